"""What a training run is: frozen dataclasses without JAX, so that the command line is quick.

Every field here and in the model's config is a flag of `jaxformer train`.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from jaxformer.artifacts.origin import Origin
from jaxformer.models.config import ConvolutionalConfig, DecoderConfig, Execution
from jaxformer.models.config.lora import LoraConfig

Model = TypeVar("Model")


def check_seed(seed: int) -> None:
    """ValueError unless a seed has a random key of its own: JAX makes one of 32 bits."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must be in 0 … {2**32 - 1}")


def _refuse_small(config, least, *names: str) -> None:
    """ValueError for a field below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def _refuse_huge(config) -> None:
    """Counts and sizes are 32 bits wide on the device, and more would end in an overflow there."""
    for name in config.__dataclass_fields__.keys() - {"seed"}:
        value = getattr(config, name)
        if isinstance(value, int) and value >= 2**31:
            raise ValueError(f"{name} is {value}; it must be at most {2**31 - 1}")


class Inputs(NamedTuple):
    """What a run reads, as config.json has it: text (files and folders; none: the standard
    library), or a source and, unless that holds both sides, a target; and the `Origin` of its
    weights and tokenizer, None: both are new."""

    text: tuple[Path, ...] = ()
    source: Path | None = None
    target: Path | None = None
    origin: Origin | None = None


class Mesh:
    """What annotates a field for `MeshSizes`: on the command line that is one word, and not a flag
    for each axis."""


@dataclass(frozen=True)
class MeshSizes(Mesh):
    """Devices along each axis of a mesh: see `models.placement`."""

    data: int = 1
    """the batch is spread"""
    fsdp: int = 1
    """the batch is spread, and so are parameters"""
    tensor: int = 1
    """a layer's own work is spread"""

    def __post_init__(self):
        _refuse_small(self, 1, "data", "fsdp", "tensor")

    @property
    def parts(self) -> int:
        """Into how many parts a batch is spread."""
        return self.data * self.fsdp


@dataclass(frozen=True)
class OptimizerConfig:
    """Which updates are made, and how large: warm-up, then a decay to a fraction of the peak."""

    optimizer: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), Lion (Chen et al. 2023), Adafactor (Shazeer & Stern 2018),
    or Muon (Jordan 2024) for kernels, but the head's, with AdamW for the rest"""
    schedule: Literal["cosine", "linear", "warmup-stable-decay"] = "cosine"
    """how the learning rate falls after the warm-up; the third stays at the peak at first"""
    learning_rate: float = 6e-4
    """peak learning rate"""
    warmup_steps: int = 100
    """steps over which the learning rate rises linearly from 0; fewer in a shorter run, and over no
    more than a tenth of the minutes"""
    decay_fraction: float = 0.2
    """last part of the run over which warmup-stable-decay falls"""
    final_fraction: float = 0.1
    """learning rate at the end of the run as a fraction of the peak"""
    weight_decay: float = 0.1
    """weight decay, applied to matrices only, not to biases and scales"""
    beta1: float = 0.9
    """decay rate of the gradient's moving average (not of Adafactor, nor of Muon's kernels)"""
    beta2: float = 0.95
    """decay rate of the squared gradient's moving average, of Lion the gradient's own (not of
    Adafactor, nor of Muon's kernels)"""
    clip_norm: float = 1.0
    """the gradient is scaled down to this global norm if it is larger"""
    average_decay: float | None = None
    """decay rate of a moving average of the weights, by which the model is scored, sampled from and
    loaded; None: no average is kept"""

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate is {self.learning_rate}; it must be above 0 and finite"
            )
        _refuse_small(self, 0, "warmup_steps")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction is {self.final_fraction}; it must be in [0, 1]")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction is {self.decay_fraction}; it must be in (0, 1]")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"weight_decay is {self.weight_decay}; it must be at least 0 and finite"
            )
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise ValueError(f"average_decay is {self.average_decay}; it must be in (0, 1)")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be above 0")


@dataclass(frozen=True)
class TrainingConfig(Generic[Model]):
    """One run: the model, how it is run, and everything that its losses depend on. What is read,
    and how much at once, is said by the kinds of run below."""

    model: Model
    execution: Execution = field(default_factory=Execution)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: Mesh | None = None
    """devices by axis: data=2,fsdp=4,tensor=1; None: data=N for all N that there are"""
    steps: int | None = 1000
    """total number of updates; None: as many as the minutes allow"""
    minutes: float | None = None
    """training ends after so long, what is compiled before not counted; None: only by steps"""
    accumulate: int = 1
    """micro-batches per update"""
    held_out: float | None = None
    """fraction that is held out; None: 0.05 or, if more, 500 kB of text (but at most 0.1), and no
    more than 10 MB; of pairs 0.05, but at most 1,000"""
    label_smoothing: float = 0.0
    """share of the target probability that is spread over all tokens"""
    seed: int = 0
    """seed for initialisation, data order, dropout and samples"""
    evaluate_every: int = 250
    """steps between evaluations on what is held out"""
    checkpoint_every: int = 250
    """steps between checkpoints"""
    keep: int = 2
    """how many of the newest checkpoints are kept"""
    keep_every: int | None = None
    """checkpoints of steps that this divides are kept too; None: none of them"""
    non_finite: Literal["stop", "skip"] = "stop"
    """a loss or gradient that is not finite ends the run, or its update is left out"""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """experiment trackers that are told what metrics.jsonl says"""
    profile: bool = False
    """write a trace of a few updates, for TensorBoard or Perfetto, into the run folder"""

    def __post_init__(self):
        _refuse_small(self, 1, "steps", "accumulate", "evaluate_every", "checkpoint_every")
        _refuse_small(self, 1, "keep_every")
        object.__setattr__(self, "trackers", tuple(self.trackers))  # JSON has lists
        if not isinstance(self.mesh, MeshSizes | None):
            raise ValueError(f"mesh is {self.mesh!r}; it must be MeshSizes")
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ValueError(f"minutes is {self.minutes}; it must be above 0 and finite")
        if self.steps is None and self.minutes is None:
            raise ValueError("steps and minutes are None; one of them must end the run")
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; it must be at least 2, one to fall back on")
        check_seed(self.seed)
        for config in (self, self.model, self.optimizer, self.lora):
            _refuse_huge(config)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be in [0, 1)")
        if self.held_out is not None and not 0 < self.held_out <= 0.5:
            raise ValueError(f"held_out is {self.held_out}; it must be in (0, 0.5]")


@dataclass(frozen=True)
class TextTraining(TrainingConfig[Model]):
    """A run that reads text in windows, and predicts each next token."""

    text_field: str = "text"
    """of records (.jsonl, .parquet, hf:), the field or column that has the text"""
    batch_size: int = 16
    """windows per micro-batch"""
    window_length: int | None = None
    """tokens per window; None: max_length"""
    packing: Literal["windows", "documents"] = "windows"
    """a window is a stretch of the text, or documents side by side that do not see one another"""
    evaluation_windows: int = 128
    """held-out windows per evaluation, the same each time; the last one scores all the text too"""
    sample_tokens: int = 200
    """tokens of the sample that each evaluation writes; 0: no sample"""

    def __post_init__(self):
        super().__post_init__()
        _refuse_small(self, 1, "batch_size", "evaluation_windows")
        _refuse_small(self, 0, "sample_tokens")
        if self.mesh is not None and self.batch_size % self.mesh.parts:
            raise ValueError(
                f"batch_size is {self.batch_size}; it does not divide by data × fsdp "
                f"({self.mesh.parts})"
            )
        longest = self.model.max_length
        if longest < 2:
            raise ValueError(f"max_length is {longest}; training needs at least 2")
        if isinstance(self.model, DecoderConfig) and self.model.prefix:
            raise ValueError(
                f"prefix is {self.model.prefix}; it must be 0, since here every token of the text "
                "is predicted, and those of a prefix are given"
            )
        if isinstance(self.model, ConvolutionalConfig) and not self.model.causal:
            raise ValueError("causal is False; training on next tokens needs a causal model")
        if self.window_length is not None and not 1 <= self.window_length <= longest:
            raise ValueError(
                f"window_length is {self.window_length}; it must be in 1 … max_length ({longest})"
            )

    @property
    def window(self) -> int:
        return self.window_length or self.model.max_length


@dataclass(frozen=True)
class HiddenTraining(TextTraining[Model]):
    """A run that reads text in windows, and predicts tokens that were hidden in them."""

    mask_rate: float = 0.15
    """share of the tokens that are hidden"""

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.mask_rate < 1:
            raise ValueError(f"mask_rate is {self.mask_rate}; it must be in (0, 1)")


@dataclass(frozen=True)
class PairTraining(TrainingConfig[Model]):
    """A run that reads sources, and predicts the target of each."""

    batch_tokens: int = 2048
    """tokens per micro-batch on each side, padding included"""
    lengths: int = 6
    """different lengths of batches: more of them have less padding, and take longer to compile"""
    lowercase: bool = False
    """all text in lower case, on both sides"""
    evaluation_pairs: int = 128
    """held-out pairs per evaluation, the same each time; the last one scores all of them too"""

    def __post_init__(self):
        super().__post_init__()
        _refuse_small(self, 1, "batch_tokens", "lengths", "evaluation_pairs")
        if self.lengths > 8:
            raise ValueError(f"lengths is {self.lengths}; it must be in 1 … 8")


# What may differ when a run is resumed: how long and how it is watched, not what is computed.
RESUMABLE = ("steps", "minutes", "evaluate_every", "evaluation_windows", "evaluation_pairs")
RESUMABLE += ("mesh", "checkpoint_every", "keep", "keep_every", "sample_tokens", "trackers")
RESUMABLE += ("profile", *Execution.__dataclass_fields__)


def differences(old: TrainingConfig, new: TrainingConfig) -> dict[str, tuple]:
    """Fields that differ, by their flag's name: (old, new)."""
    found = {}
    for name in old.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, OptimizerConfig | Execution | LoraConfig) or name == "model":
            found |= {
                inner: (getattr(before, inner), getattr(after, inner))
                for inner in before.__dataclass_fields__
                if getattr(before, inner) != getattr(after, inner)
            }
        else:
            found[name] = (before, after)
    return found
