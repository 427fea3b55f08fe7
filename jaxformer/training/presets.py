"""Named presets of complete runs, and the settings of runs that fine-tune a checkpoint."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_copies import lowers_case
from jaxformer.models import config as configs
from jaxformer.models.config import KINDS, PRESETS, Execution
from jaxformer.models.config.model import ModelConfig
from jaxformer.training.config import (
    MaskedTokensTraining,
    OptimizerConfig,
    PairTraining,
    PreferenceTraining,
    RecordTraining,
    TextTraining,
    TrainingConfig,
    TuningTraining,
    differences,
)

# Config class of a training run, by the kind of its model.
TRAININGS = {
    "decoder": TextTraining,
    "encoder": MaskedTokensTraining,
    "encoder-decoder": PairTraining,
    "recurrent": TextTraining,
    "recurrent-encoder-decoder": PairTraining,
    "convolutional": TextTraining,
}
_UNROLLED = Execution(layers="unrolled")
# Tokens per window in runs that train on the source code of Python's standard library.
_WINDOW = 128


def _stdlib(
    model: ModelConfig, learning_rate: float, steps: int = 2500, batch_size: int = 8
) -> TextTraining:
    """Returns the config of a run of about five minutes (two cores) on the standard library."""
    training = MaskedTokensTraining if model.bidirectional else TextTraining
    return training(
        model=model,
        execution=_UNROLLED,
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=50, final_fraction=0.0),
        steps=steps,
        batch_size=batch_size,
        # None means max_length, also if the user changes max_length.
        window_length=None if model.max_length == _WINDOW else _WINDOW,
        evaluate_every=500,
        checkpoint_every=500,
    )


# A gated feed-forward layer of width 344 has about as many parameters as a plain one of width 512.
_LIBRARY: dict[str, Any] = {"vocab_size": 2048, "max_length": _WINDOW, "embed_dim": 128}
_LIBRARY |= {"num_layers": 4, "num_heads": 2, "mlp_dim": 344}
_LIBRARY |= {"positions": "rotary", "use_bias": False}
_LLAMA = configs.DecoderConfig(**_LIBRARY, norm="rms", activation="swiglu")
_MODERNBERT = configs.EncoderConfig(
    **_LIBRARY, activation="geglu", embedding_norm=True, first_attention_norm=False, pooler=False
)


_LSTM = configs.RecurrentConfig(vocab_size=2048, embed_dim=224, num_layers=2)
_WAVENET = configs.ConvolutionalConfig(
    vocab_size=2048, embed_dim=160, num_layers=7, kernel_size=4, dilation_growth=2
)


def _tiny(model: ModelConfig) -> TrainingConfig:
    """Returns the config of a run of a few seconds that exercises every part of training."""
    training = TRAININGS[configs.architecture_name(model)]
    of_text = {"evaluation_windows": 16, "sample_tokens": 64}
    of_pairs = {"batch_tokens": 512, "lengths": 2, "evaluation_pairs": 16}
    sizes: dict[str, Any] = of_pairs if training is PairTraining else of_text
    return training(
        model=model,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        steps=60,
        evaluate_every=30,
        checkpoint_every=20,
        **sizes,
    )


_SMALL = {"vocab_size": 512, "max_length": 64, "num_layers": 2, "embed_dim": 64}


def _translation(model: ModelConfig) -> PairTraining:
    """Returns the config of a one-hour run (two cores) for 10,000 or more pairs, as in Multi30k."""
    return PairTraining(
        model=model,
        execution=_UNROLLED,
        optimizer=OptimizerConfig(
            learning_rate=3e-3, warmup_steps=200, final_fraction=0.0, weight_decay=0.01, beta2=0.98
        ),
        steps=None,
        max_minutes=60.0,
        label_smoothing=0.1,
        evaluate_every=500,
        checkpoint_every=500,
    )


def _shakespeare(
    model: ModelConfig,
    steps: int,
    batch_size: int,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
) -> TextTraining:
    """Returns a byte-level config with the settings of nanoGPT's README for Tiny Shakespeare."""
    return TextTraining(
        model=model,
        execution=execution,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100),
        steps=steps,
        batch_size=batch_size,
        validation_fraction=0.1,
    )


# These options match BERT and PEGASUS, so that the models can be exported to transformers.
_BERT: dict[str, Any] = {"norm_position": "post", "embedding_norm": True}
_PEGASUS: dict[str, Any] = {"positions": "sinusoidal_halves", "scale_embeddings": True}
_SENTENCES = {"vocab_size": 5000, "max_length": 256, "dropout": 0.2}
_FOUR_LAYERS: dict[str, Any] = {"num_layers": 4, "embed_dim": 128, "num_heads": 4, "mlp_dim": 256}
_FOUR_LAYERS |= {"activation": "relu"}
_TRANSLATOR = configs.EncoderDecoderConfig(**_SENTENCES, **_PEGASUS, **_FOUR_LAYERS)
_LSTM_TRANSLATOR = configs.RecurrentEncoderDecoderConfig(**_SENTENCES, num_layers=2, embed_dim=192)
_BYTES: dict[str, Any] = {"vocab_size": 257, "use_bias": False}
_FOR_CPU = configs.DecoderConfig(**_BYTES, max_length=64, num_layers=4, embed_dim=128, num_heads=4)
_FOR_GPU = configs.DecoderConfig(
    **_BYTES, max_length=256, num_layers=6, embed_dim=384, num_heads=6, dropout=0.2
)

RUNS: dict[str, dict[str, TrainingConfig]] = {
    "stdlib": {
        "decoder": _stdlib(_LLAMA, 4e-3),
        # With a larger learning rate or fewer targets per update, the model learns little more than
        # the frequencies of the tokens.
        "encoder": _stdlib(_MODERNBERT, 2e-3, steps=1250, batch_size=16),
        "recurrent": _stdlib(_LSTM, 1.6e-2),
        "convolutional": _stdlib(_WAVENET, 8e-3),
    },
    "translation": {
        "encoder-decoder": _translation(_TRANSLATOR),
        "recurrent-encoder-decoder": _translation(_LSTM_TRANSLATOR),
    },
    "tiny": {
        "decoder": _tiny(configs.DecoderConfig(**_SMALL, num_heads=2)),
        "encoder": _tiny(configs.EncoderConfig(**_SMALL, **_BERT, num_heads=2)),
        "recurrent": _tiny(configs.RecurrentConfig(**_SMALL)),
        "convolutional": _tiny(configs.ConvolutionalConfig(**_SMALL)),
        "encoder-decoder": _tiny(configs.EncoderDecoderConfig(**_SMALL, **_PEGASUS, num_heads=2)),
        "recurrent-encoder-decoder": _tiny(configs.RecurrentEncoderDecoderConfig(**_SMALL)),
    },
    "shakespeare": {
        "decoder": _shakespeare(_FOR_CPU, steps=2000, batch_size=12, execution=_UNROLLED)
    },
    "shakespeare-gpu": {"decoder": _shakespeare(_FOR_GPU, steps=5000, batch_size=64)},
}


def training_preset(name: str, kind: str) -> TrainingConfig:
    """Returns the preset of a run by name.

    If `name` is the name of a model preset, the run trains this model with default settings.

    Raises:
        ValueError: There is no preset with this name for models of this kind.
    """
    if kind in RUNS.get(name, ()):
        return RUNS[name][kind]
    models = {x: model for x, model in PRESETS.items() if type(model) is KINDS[kind]}
    if name in models:
        return TRAININGS[kind](model=models[name])
    names = [run for run, kinds in RUNS.items() if kind in kinds]
    raise ValueError(
        f"preset is {name!r}; for --model {kind} it must be one of {', '.join([*names, *models])}"
    )


def kinds_with_preset(name: str) -> list[str]:
    """Returns the kinds of model with a preset of this name, starting with the default kind."""
    if name in PRESETS:
        return [configs.architecture_name(PRESETS[name])]
    return list(RUNS.get(name, ()))


def usual_preset(kind: str) -> str:
    """Returns the name of the default preset for a kind of model."""
    return next(name for name, kinds in RUNS.items() if kind in kinds)


# Fields of a model's config that change neither the parameters nor their meaning.
CHANGEABLE = ("dropout", "dtype")


def fine_tuning(kind: str, model: ModelConfig, preset: str | None) -> TrainingConfig:
    """Returns the settings of a run that fine-tunes an existing model.

    Args:
        kind: The kind of model, a key of `KINDS`.
        model: The model's config.
        preset: The name of the preset with the training settings. If None, the run has the default
            settings with a learning rate of 1e-4.

    Raises:
        ValueError: There is no preset with this name for models of this kind.
    """
    if preset is None:
        return TRAININGS[kind](model, optimizer=OptimizerConfig(learning_rate=1e-4))
    settings = RUNS.get(preset, {})
    if kind not in settings:
        names = ", ".join(name for name, kinds in RUNS.items() if kind in kinds)
        raise ValueError(
            f"preset is {preset!r}; to fine-tune the model of --init-from (--model {kind}), it "
            f"must be one of {names}"
        )
    chosen = settings[kind]
    if isinstance(chosen, TextTraining) and chosen.window_length is not None:
        chosen = replace(chosen, window_length=min(chosen.window_length, model.max_length))
    return replace(chosen, model=model)


# Default learning rate for DPO in trl 1.16.
_PREFERENCE_RATE = 1e-6


def record_training(
    training: TrainingConfig, *, has_preferences: bool, has_rate: bool
) -> RecordTraining:
    """Returns the settings of a run that tunes the model of `training` on records.

    Args:
        training: The settings of a run on text.
        has_preferences: Whether the records have a better and a worse answer.
        has_rate: Whether the learning rate of `training` comes from a preset.

    Raises:
        ValueError: The model does not predict the next token of a text.
    """
    if type(training) is not TextTraining:
        kind = configs.architecture_name(training.model)
        raise ValueError(
            "the records have prompts with answers, but only models that continue a text can be "
            f"tuned on them; the model is of the architecture {kind}"
        )
    shared = {field.name: getattr(training, field.name) for field in fields(TrainingConfig)}
    if not has_preferences:
        return TuningTraining(**shared)
    if not has_rate:
        shared["optimizer"] = replace(training.optimizer, learning_rate=_PREFERENCE_RATE)
    return PreferenceTraining(**shared)


def config_class(kind: str, training: Mapping[str, Any]) -> type[TrainingConfig]:
    """Returns the class of a run's config.

    Args:
        kind: The kind of model, a key of `KINDS`.
        training: The section "training" of config.json.
    """
    marks = {"loss_on": TuningTraining, "dpo_beta": PreferenceTraining}
    return next((marks[name] for name in marks if name in training), TRAININGS[kind])


def check_same_model(path: Path, before: TrainingConfig, after: TrainingConfig) -> None:
    """Checks that the user's flags do not change the model of a checkpoint.

    Args:
        path: The checkpoint.
        before: The settings with the checkpoint's model.
        after: The settings after the user's flags have been applied.

    Raises:
        ValueError: A field of the model differs, and `CHANGEABLE` does not list this field.
    """
    changed = differences(before.model, after.model) | differences(before.own, after.own)
    for name, (old, new) in changed.items():
        if name not in CHANGEABLE:
            accepted = ", ".join("--" + field for field in CHANGEABLE)
            raise ValueError(
                f"--{name.replace('_', '-')} is {new}, but the model in {path} has {old}; for "
                f"an existing model, you can change only {accepted}"
            )


def check_head(path: Path, config: ModelConfig, model_type: str | None) -> None:
    """Checks that the output head of a checkpoint's model predicts tokens.

    Training supports no other output head. BertForPreTraining is accepted, because it also predicts
    masked tokens.

    Args:
        path: The checkpoint.
        config: The checkpoint's config.
        model_type: The checkpoint's model_type in transformers, or None.

    Raises:
        ValueError: The model is a classifier.
    """
    labels = getattr(config, "num_labels", 0)
    predicts_tokens = model_type == "bert" and getattr(config, "transform", False)
    if labels and not predicts_tokens:
        raise ValueError(
            f"{path} is a classifier (num_labels is {labels}), which training does not support; "
            "use a model that predicts tokens"
        )


def check_tokenizer(path: Path, tokenizer: Tokenizer | None, config: TrainingConfig) -> None:
    """Checks that a checkpoint's tokenizer is suitable for the task and the model.

    Args:
        path: The checkpoint.
        tokenizer: The checkpoint's tokenizer, or None if it is missing.
        config: The settings of the run.

    Raises:
        ValueError: The tokenizer is missing, lacks a special token that the task needs, uses ids
            that the model does not have, or lowercases texts although `lowercase` is false.
    """
    if tokenizer is None:
        raise ValueError(
            f"{path} has no tokenizer, so the text cannot be read; put its tokenizer.json "
            "beside its weights"
        )
    if isinstance(config, PairTraining):
        if not tokenizer.stop_tokens:
            raise ValueError(f"{path}: no token ends a target; set eos_token_id in config.json")
        if lowers_case(tokenizer) and not config.lowercase:
            raise ValueError(
                f"--no-lowercase has no effect here: the tokenizer of {path} lowercases every text"
            )
    try:
        opening = tokenizer.opening
    except ValueError:
        raise ValueError(
            f"{path}: the tokenizer has no token that begins a text; set bos_token_id or "
            "eos_token_id in config.json"
        ) from None
    needed = {*opening, *tokenizer.stop_tokens, *tokenizer.before, *tokenizer.after}
    if isinstance(config, MaskedTokensTraining):
        if tokenizer.mask_token is None:
            raise ValueError(
                f"{path}: the tokenizer has no mask token; add [MASK] or <mask> to its special "
                "tokens, because the task replaces tokens by the mask token"
            )
        needed.add(tokenizer.mask_token)
    if max(needed) >= config.model.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer uses the id {max(needed)}; it must be below the model's "
            f"vocab_size ({config.model.vocab_size})"
        )
