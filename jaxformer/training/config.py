"""What a training run is: a frozen dataclass without JAX, so that the command line is quick.

Every field here and in the model's config is a flag of `jaxformer train`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from jaxformer.models.config import PRESETS, DecoderConfig, Execution


def check_seed(seed: int) -> None:
    """ValueError unless a seed has a random key of its own: JAX makes one of 32 bits."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must be in 0 … {2**32 - 1}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with warm-up, then a decay to a fraction of the peak."""

    learning_rate: float = 6e-4
    """peak learning rate"""
    warmup_steps: int = 100
    """steps over which the learning rate rises linearly from 0"""
    final_fraction: float = 0.1
    """learning rate of the last step as a fraction of the peak (cosine decay)"""
    weight_decay: float = 0.1
    """weight decay, applied to matrices only, not to biases and scales"""
    beta1: float = 0.9
    """decay rate of the gradient's moving average"""
    beta2: float = 0.95
    """decay rate of the squared gradient's moving average"""
    clip_norm: float = 1.0
    """the gradient is scaled down to this global norm if it is larger"""

    def __post_init__(self):
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must be at least 0")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction is {self.final_fraction}; it must be in [0, 1]")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be at least 0")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be above 0")


@dataclass(frozen=True)
class TrainingConfig:
    """One run: the model, how it is run, and everything that its losses depend on."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    execution: Execution = field(default_factory=Execution)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 1000
    """total number of updates"""
    batch_size: int = 16
    """windows per micro-batch"""
    accumulate: int = 1
    """micro-batches per update"""
    window_length: int | None = None
    """tokens per window; None: max_length"""
    held_out: float | None = None
    """fraction of the text that is held out; None: 0.05, or 500 kB if more, but at most 0.1"""
    label_smoothing: float = 0.0
    """share of the target probability that is spread over all tokens"""
    seed: int = 0
    """seed for initialisation, data order, dropout and samples"""
    evaluate_every: int = 250
    """steps between evaluations on held-out text"""
    evaluation_windows: int = 128
    """held-out windows per evaluation, the same each time; the last one scores all the text too"""
    checkpoint_every: int = 250
    """steps between checkpoints"""
    keep: int = 2
    """how many of the newest checkpoints are kept"""
    sample_tokens: int = 200
    """tokens of the sample that each evaluation writes; 0: no sample"""

    def __post_init__(self):
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sample_tokens < 0:
            raise ValueError(f"sample_tokens is {self.sample_tokens}; it must be at least 0")
        if self.model.max_length < 2:
            raise ValueError(f"max_length is {self.model.max_length}; training needs at least 2")
        if self.model.prefix:
            raise ValueError(
                f"prefix is {self.model.prefix}; it must be 0, since here every token of the text "
                "is predicted, and those of a prefix are given"
            )
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; it must be at least 2, one to fall back on")
        check_seed(self.seed)
        for config in (self, self.model, self.optimizer):
            _refuse_huge(config)
        if self.window_length is not None and not 1 <= self.window_length <= self.model.max_length:
            raise ValueError(
                f"window_length is {self.window_length}; it must be in 1 … max_length "
                f"({self.model.max_length})"
            )
        if self.window < self.model.max_length and self.model.positions == "learned":
            raise ValueError(
                f"window_length is {self.window_length}; with learned positions it must be "
                f"max_length ({self.model.max_length}), or those after it are never learnt"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be in [0, 1)")
        if self.held_out is not None and not 0 < self.held_out <= 0.5:
            raise ValueError(f"held_out is {self.held_out}; it must be in (0, 0.5]")

    @property
    def window(self) -> int:
        return self.window_length or self.model.max_length


def _refuse_huge(config) -> None:
    """Counts and sizes are 32 bits wide on the device, and more would end in an overflow there."""
    for name in config.__dataclass_fields__.keys() - {"seed"}:
        value = getattr(config, name)
        if isinstance(value, int) and value >= 2**31:
            raise ValueError(f"{name} is {value}; it must be at most {2**31 - 1}")


_COUNTS = ("steps", "batch_size", "accumulate", "evaluate_every", "evaluation_windows")
_COUNTS += ("checkpoint_every",)

# What may differ when a run is resumed: how long and how it is watched, not what is computed.
RESUMABLE = ("steps", "evaluate_every", "evaluation_windows", "checkpoint_every", "keep")
RESUMABLE += ("sample_tokens", *Execution.__dataclass_fields__)

# The verb trains decoders.
_DECODERS = {name: model for name, model in PRESETS.items() if isinstance(model, DecoderConfig)}
Preset = Literal["stdlib", "tiny", "shakespeare", "shakespeare-gpu", *_DECODERS]

_RUNS = {
    # Two cores, about five minutes, on the Python standard library.
    "stdlib": TrainingConfig(
        model=DecoderConfig(
            vocab_size=2048,
            max_length=128,
            num_layers=4,
            embed_dim=128,
            num_heads=2,
            norm="rms",
            positions="rotary",
            use_bias=False,
        ),
        execution=Execution(layers="unrolled"),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50, final_fraction=0.0),
        steps=2500,
        batch_size=8,
        evaluate_every=500,
        checkpoint_every=500,
    ),
    # Seconds: to see everything work.
    "tiny": TrainingConfig(
        model=DecoderConfig(vocab_size=512, max_length=64, num_layers=2, embed_dim=64, num_heads=2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        steps=60,
        evaluate_every=30,
        checkpoint_every=20,
        evaluation_windows=16,
        sample_tokens=64,
    ),
    # nanoGPT's two settings for Tiny Shakespeare (its README), byte by byte.
    "shakespeare": TrainingConfig(
        model=DecoderConfig(
            vocab_size=257,
            max_length=64,
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            use_bias=False,
        ),
        execution=Execution(layers="unrolled"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100),
        steps=2000,
        batch_size=12,
        held_out=0.1,
    ),
    "shakespeare-gpu": TrainingConfig(
        model=DecoderConfig(
            vocab_size=257,
            max_length=256,
            num_layers=6,
            embed_dim=384,
            num_heads=6,
            use_bias=False,
            dropout=0.2,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100),
        steps=5000,
        batch_size=64,
        held_out=0.1,
    ),
}


def training_preset(name: str) -> TrainingConfig:
    """A whole run by name; a model's preset gives that model with plain settings."""
    if name in _RUNS:
        return _RUNS[name]
    if name in _DECODERS:
        return replace(TrainingConfig(), model=_DECODERS[name])
    raise ValueError(f"preset is {name!r}; it must be one of {', '.join([*_RUNS, *_DECODERS])}")


def differences(old: TrainingConfig, new: TrainingConfig) -> dict[str, tuple]:
    """Fields that differ, by their flag's name: (old, new)."""
    found = {}
    for name in old.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if hasattr(before, "__dataclass_fields__"):
            found |= {
                inner: (getattr(before, inner), getattr(after, inner))
                for inner in before.__dataclass_fields__
                if getattr(before, inner) != getattr(after, inner)
            }
        else:
            found[name] = (before, after)
    return found
