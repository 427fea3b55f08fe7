"""Settings of a run that begins from a checkpoint, and their checks."""

from dataclasses import replace
from pathlib import Path

from jaxformer.artifacts.tokenizer import Tokenizer, lowers_case
from jaxformer.models.config.model import ModelConfig
from jaxformer.training.config import (
    HiddenTraining,
    OptimizerConfig,
    PairTraining,
    TextTraining,
    TrainingConfig,
    differences,
)
from jaxformer.training.presets import RUNS, TRAININGS

# Fields of a model's config that change neither its parameters nor their meaning.
CHANGEABLE = ("dropout", "dtype")


def fine_tuning(kind: str, model: ModelConfig, preset: str | None) -> TrainingConfig:
    """Returns the settings of a run that trains an existing model further.

    Args:
        kind: The kind of the model.
        model: The config of the model.
        preset: The preset of the training settings; None: default settings with a learning rate
            of 1e-4.

    Raises:
        ValueError: The kind has no preset of this name.
    """
    if preset is None:
        return TRAININGS[kind](model, optimizer=OptimizerConfig(learning_rate=1e-4))
    settings = RUNS.get(preset, {})
    if kind not in settings:
        names = ", ".join(name for name, kinds in RUNS.items() if kind in kinds)
        raise ValueError(
            f"preset is {preset!r}; with --from, whose model is of kind {kind}, it must be one of "
            f"{names}"
        )
    chosen = settings[kind]
    if isinstance(chosen, TextTraining) and chosen.window_length is not None:
        chosen = replace(chosen, window_length=min(chosen.window_length, model.max_length))
    return replace(chosen, model=model)


def check_same_model(path: Path, before: TrainingConfig, after: TrainingConfig) -> None:
    """Checks that no flag changes the model of a checkpoint.

    Args:
        path: The checkpoint.
        before: The settings with the model of the checkpoint.
        after: The settings with the user's flags.

    Raises:
        ValueError: A field of the model differs and is not in `CHANGEABLE`.
    """
    same = replace(after, model=before.model)
    for name, (old, new) in differences(same, after).items():
        if name not in CHANGEABLE:
            accepted = ", ".join("--" + field for field in CHANGEABLE)
            raise ValueError(
                f"--{name.replace('_', '-')} is {new}, but the model in {path} has {old}; for an "
                f"existing model only {accepted} may change"
            )


def check_head(path: Path, config: ModelConfig, family: str | None) -> None:
    """Checks that the head of a checkpoint predicts tokens, since nothing else can be trained.

    BertForPreTraining passes: beside its classifier of sentence pairs, it predicts masked tokens.

    Args:
        path: The checkpoint.
        config: Its config.
        family: Its model_type of transformers, or None.

    Raises:
        ValueError: The model is a classifier.
    """
    labels = getattr(config, "num_labels", 0)
    predicts_tokens = family == "bert" and getattr(config, "transform", False)
    if labels and not predicts_tokens:
        raise ValueError(
            f"{path} is a classifier (num_labels is {labels}); classifiers cannot be trained yet, "
            "only models that predict tokens"
        )


def check_tokenizer(path: Path, tokenizer: Tokenizer | None, config: TrainingConfig) -> None:
    """Checks that the tokenizer of a checkpoint suits the task and the model.

    Args:
        path: The checkpoint.
        tokenizer: Its tokenizer; None: it has none.
        config: The settings of the run.

    Raises:
        ValueError: The tokenizer is missing, lacks a special token of the task, uses ids that
            the model does not have, or lowercases texts although the settings say otherwise.
    """
    if tokenizer is None:
        raise ValueError(
            f"{path} has no tokenizer to read the text with; put its tokenizer.json "
            "beside its weights"
        )
    if isinstance(config, PairTraining) and not tokenizer.stop_tokens:
        raise ValueError(f"{path}: no token ends a target; set eos_token_id in config.json")
    is_kept = isinstance(config, PairTraining) and not config.lowercase
    if is_kept and lowers_case(tokenizer):
        raise ValueError(
            f"--no-lowercase has no effect here: the tokenizer of {path} lowercases every text"
        )
    if isinstance(config, HiddenTraining) and tokenizer.mask_token is None:
        raise ValueError(
            f"{path}: its tokenizer has no mask token, which replaces hidden tokens; it must have "
            "[MASK] or <mask> among its special tokens"
        )
    try:
        opening = tokenizer.opening
    except ValueError:
        raise ValueError(
            f"{path}: its tokenizer has no token that begins a text; set bos_token_id or "
            "eos_token_id in config.json"
        ) from None
    needed = {*opening, *tokenizer.stop_tokens, *tokenizer.before, *tokenizer.after}
    if isinstance(config, HiddenTraining) and tokenizer.mask_token is not None:
        needed.add(tokenizer.mask_token)
    if max(needed) >= config.model.vocab_size:
        raise ValueError(
            f"{path}: its tokenizer uses the id {max(needed)}; it must be below the model's "
            f"vocab_size ({config.model.vocab_size})"
        )
