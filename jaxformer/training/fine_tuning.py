"""A run that begins from a checkpoint: its settings, and what it refuses of them."""

from dataclasses import replace

from jaxformer.training.config import (
    HiddenTraining,
    OptimizerConfig,
    PairTraining,
    TrainingConfig,
    differences,
)
from jaxformer.training.presets import RUNS, TRAININGS

# What of a model's config changes neither its parameters nor what they mean.
CHANGEABLE = ("dropout", "dtype")


def fine_tuning(kind: str, model, preset: str | None) -> TrainingConfig:
    """The settings of the preset or, without one, plain ones at a learning rate of 1e-4, for a
    model that is there already."""
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
    if isinstance(getattr(chosen, "window_length", None), int):
        window = min(chosen.window_length, model.max_length)
        return replace(chosen, model=model, window_length=window)
    return replace(chosen, model=model)


def refuse_another_model(path, before: TrainingConfig, after: TrainingConfig) -> None:
    """ValueError for a flag that would make another model of the checkpoint's."""
    same = replace(after, model=before.model)
    for name, (old, new) in differences(same, after).items():
        if name not in CHANGEABLE:
            accepted = ", ".join("--" + field for field in CHANGEABLE)
            raise ValueError(
                f"--{name.replace('_', '-')} is {new}, but the model in {path} has {old}; of a "
                f"model that is there only {accepted} may change"
            )


def refuse_tokenizer(path, tokenizer, config: TrainingConfig) -> None:
    """ValueError if a checkpoint's tokenizer, which the text is to be read by, lacks what the task
    needs, or has ids that the model does not."""
    if tokenizer is None:
        raise ValueError(
            f"{path} has no tokenizer, by which the text is to be read; put its tokenizer.json "
            "beside its weights"
        )
    if isinstance(config, PairTraining) and not tokenizer.stop_tokens:
        raise ValueError(f"{path}: no token ends a target; name it in config.json, as eos_token_id")
    if isinstance(config, HiddenTraining) and tokenizer.mask_token is None:
        raise ValueError(
            f"{path}: its tokenizer has no mask to hide tokens by; it must have [MASK] or <mask> "
            "among its special tokens"
        )
    try:
        opening = tokenizer.opening
    except ValueError:
        raise ValueError(
            f"{path}: its tokenizer has no token to begin a text with; name one in config.json, as "
            "bos_token_id or eos_token_id"
        ) from None
    needed = {*opening, *tokenizer.stop_tokens, *tokenizer.before, *tokenizer.after}
    if isinstance(config, HiddenTraining):
        needed.add(tokenizer.mask_token)
    if max(needed) >= config.model.vocab_size:
        raise ValueError(
            f"{path}: its tokenizer uses the id {max(needed)}; the model has a vocab_size of "
            f"{config.model.vocab_size}"
        )
