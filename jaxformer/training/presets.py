"""Whole runs by name, for each kind of model."""

from jaxformer.models import config as configs
from jaxformer.models.config import KINDS, PRESETS, Execution
from jaxformer.training.config import (
    HiddenTraining,
    OptimizerConfig,
    PairTraining,
    TextTraining,
    TrainingConfig,
)

TRAININGS = {
    "decoder": TextTraining,
    "recurrent": TextTraining,
    "convolutional": TextTraining,
    "encoder": HiddenTraining,
    "encoder-decoder": PairTraining,
    "recurrent-encoder-decoder": PairTraining,
}
_UNROLLED = Execution(layers="unrolled")


def _stdlib(model, learning_rate: float, steps: int = 2500, batch_size: int = 8):
    """Two cores, about five minutes, on the Python standard library."""
    training = HiddenTraining if isinstance(model, configs.EncoderConfig) else TextTraining
    return training(
        model=model,
        execution=_UNROLLED,
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=50, final_fraction=0.0),
        steps=steps,
        batch_size=batch_size,
        window_length=128,
        evaluate_every=500,
        checkpoint_every=500,
    )


_LIBRARY = {"vocab_size": 2048, "max_length": 128, "embed_dim": 128}
_TRANSFORMER = {
    "num_layers": 4,
    "num_heads": 2,
    "norm": "rms",
    "positions": "rotary",
    "use_bias": False,
}


def _tiny(training, model):
    """Seconds: to see everything work."""
    return training(
        model=model,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        steps=60,
        evaluate_every=30,
        checkpoint_every=20,
        **(
            {"batch_tokens": 512, "lengths": 2, "evaluation_pairs": 16}
            if training is PairTraining
            else {"evaluation_windows": 16, "sample_tokens": 64}
        ),
    )


_SMALL = {"vocab_size": 512, "max_length": 64, "num_layers": 2, "embed_dim": 64}


def _translation(model):
    """An hour on two cores for some ten thousand pairs of sentences (Multi30k)."""
    return PairTraining(
        model=model,
        execution=_UNROLLED,
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            warmup_steps=200,
            final_fraction=0.0,
            weight_decay=0.01,
            beta2=0.98,
        ),
        steps=None,
        minutes=60.0,
        label_smoothing=0.1,
        evaluate_every=500,
        checkpoint_every=500,
    )


_SENTENCES = {"vocab_size": 5000, "max_length": 256, "dropout": 0.2}
_SHAKESPEARE = {"use_bias": False, "vocab_size": 257}

RUNS: dict[str, dict[str, TrainingConfig]] = {
    "stdlib": {
        "decoder": _stdlib(configs.DecoderConfig(**_LIBRARY, **_TRANSFORMER), 4e-3),
        # Larger updates, or fewer targets in each, and it learns little but how often tokens come.
        "encoder": _stdlib(
            configs.EncoderConfig(**_LIBRARY, **_TRANSFORMER), 2e-3, steps=1250, batch_size=16
        ),
        "recurrent": _stdlib(
            configs.RecurrentConfig(vocab_size=2048, embed_dim=224, num_layers=2), 1.6e-2
        ),
        "convolutional": _stdlib(
            configs.ConvolutionalConfig(
                vocab_size=2048, embed_dim=160, num_layers=7, kernel_size=4, dilation_growth=2
            ),
            8e-3,
        ),
    },
    "translation": {
        "encoder-decoder": _translation(
            configs.EncoderDecoderConfig(
                **_SENTENCES,
                num_layers=4,
                embed_dim=128,
                num_heads=4,
                mlp_dim=256,
                activation="relu",
                positions="rotary",
            )
        ),
        "recurrent-encoder-decoder": _translation(
            configs.RecurrentEncoderDecoderConfig(**_SENTENCES, num_layers=2, embed_dim=192)
        ),
    },
    "tiny": {
        "decoder": _tiny(TextTraining, configs.DecoderConfig(**_SMALL, num_heads=2)),
        "encoder": _tiny(HiddenTraining, configs.EncoderConfig(**_SMALL, num_heads=2)),
        "recurrent": _tiny(TextTraining, configs.RecurrentConfig(**_SMALL)),
        "convolutional": _tiny(TextTraining, configs.ConvolutionalConfig(**_SMALL)),
        "encoder-decoder": _tiny(PairTraining, configs.EncoderDecoderConfig(**_SMALL, num_heads=2)),
        "recurrent-encoder-decoder": _tiny(
            PairTraining, configs.RecurrentEncoderDecoderConfig(**_SMALL)
        ),
    },
    # nanoGPT's two settings for Tiny Shakespeare (its README), byte by byte.
    "shakespeare": {
        "decoder": TextTraining(
            model=configs.DecoderConfig(
                **_SHAKESPEARE, max_length=64, num_layers=4, embed_dim=128, num_heads=4
            ),
            execution=_UNROLLED,
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100),
            steps=2000,
            batch_size=12,
            held_out=0.1,
        )
    },
    "shakespeare-gpu": {
        "decoder": TextTraining(
            model=configs.DecoderConfig(
                **_SHAKESPEARE,
                max_length=256,
                num_layers=6,
                embed_dim=384,
                num_heads=6,
                dropout=0.2,
            ),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100),
            steps=5000,
            batch_size=64,
            held_out=0.1,
        )
    },
}


def training_preset(name: str, kind: str) -> TrainingConfig:
    """A whole run by name; a model's preset gives that model with plain settings."""
    if kind in RUNS.get(name, ()):
        return RUNS[name][kind]
    models = {x: model for x, model in PRESETS.items() if type(model) is KINDS[kind]}
    if name in models:
        return TRAININGS[kind](model=models[name])
    names = [run for run, kinds in RUNS.items() if kind in kinds]
    raise ValueError(
        f"preset is {name!r}; for --model {kind} it must be one of {', '.join([*names, *models])}"
    )


def kinds_of(name: str) -> list[str]:
    """The kinds of model for which there is a preset of that name, the usual one first."""
    if name in PRESETS:
        return [configs.kind_of(PRESETS[name])]
    return list(RUNS.get(name, ()))


def usual_preset(kind: str) -> str:
    """The first preset that there is for a kind."""
    return next(name for name, kinds in RUNS.items() if kind in kinds)
