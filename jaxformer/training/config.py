"""Configs of training runs: frozen dataclasses.

Every field here and in the model's config is a flag of `jaxformer train`. This module does not
import JAX, so that the command line starts quickly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar

from jaxformer.artifacts.run import Origin
from jaxformer.models.config import KINDS, Execution
from jaxformer.models.config.check import (
    check_at_least,
    check_fields,
    check_fraction,
    check_positive,
    shown,
)
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import Needs, is_given, is_one_of

Model = TypeVar("Model", bound=ModelConfig)
LARGEST_FLOAT = 2.0**127  # the largest float32, up to a factor of 2


def check_seed(seed: int) -> None:
    """Checks that a seed fits into 32 bits, so that every seed gives a different random key.

    Raises:
        ValueError: `seed` is not in 0 … 2^32 - 1.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {shown(seed)}; it must be in 0 … {2**32 - 1}")


def _check(
    config: "OptimizerConfig | RunConfig",
    name: str,
    is_accepted: Callable[[float], bool],
    accepted: str,
) -> None:
    """Raises ValueError if the value of a field is not accepted; None passes."""
    value = getattr(config, name)
    if value is not None and not is_accepted(value):
        raise ValueError(f"{name} is {value}; it must be {accepted}")


class Inputs(NamedTuple):
    """Inputs of a run, as in config.json: either `text`, or `source` with or without `target`.

    Attributes:
        text: Files and folders. Empty: Python's standard library, unless there is a source.
        source: The file of sources, or of both sides.
        target: The file of targets; None: `source` holds both sides.
        origin: The checkpoint from which the weights and the tokenizer come; None: both are new.
    """

    text: tuple[Path, ...] = ()
    source: Path | None = None
    target: Path | None = None
    origin: Origin | None = None


# Default peak learning rate of each optimizer. An update of Adafactor is relative to the size of
# the parameters, so its learning rate is larger: at most 0.01 in Shazeer & Stern 2018, §8. Lion's
# is a third of AdamW's (Chen et al. 2023, §5). Muon's updates are scaled to the size of Adam's.
LEARNING_RATES = {"adamw": 6e-4, "lion": 2e-4, "adafactor": 0.01, "muon": 6e-4}


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer and of the learning rate's warm-up and decay.

    Without `learning_rate`, the peak is the optimizer's default in `LEARNING_RATES`.
    """

    needs: ClassVar[Needs] = {
        "decay_fraction": (is_one_of("schedule", "warmup-stable-decay"),),
        "beta1": (is_one_of("optimizer", "adamw", "lion", "muon"),),
        "beta2": (is_one_of("optimizer", "adamw", "lion", "muon"),),
    }

    optimizer: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), Lion (Chen et al. 2023), Adafactor (Shazeer & Stern 2018),
    or Muon (Jordan 2024) for all kernels except the head's, with AdamW for the rest"""
    schedule: Literal["cosine", "linear", "warmup-stable-decay"] = "cosine"
    """how the learning rate falls after the warm-up; warmup-stable-decay first stays at the peak"""
    learning_rate: float | None = None
    """peak learning rate"""
    warmup_steps: int = 100
    """steps over which the learning rate rises linearly from 0; fewer than the steps of the run"""
    decay_fraction: float = 0.2
    """fraction of the run, at its end, over which warmup-stable-decay falls; it never falls during
    the warm-up steps of a run that is limited by steps"""
    final_fraction: float = 0.1
    """learning rate at the end of the run as a fraction of the peak"""
    weight_decay: float = 0.1
    """weight decay, applied to matrices only, not to biases and scales"""
    beta1: float = 0.9
    """decay rate of the gradient's moving average (unused by Adafactor and by Muon's kernels)"""
    beta2: float = 0.95
    """decay rate of the squared gradient's moving average; for Lion, of the gradient's moving
    average (unused by Adafactor and by Muon's kernels)"""
    clip_norm: float = 1.0
    """largest global norm of the gradient; a larger gradient is scaled down to it"""
    average_decay: float | None = None
    """decay rate of a moving average of the weights, which is used for scores, samples and loading;
    None: no average"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_fields(self)
        check_positive(self, "learning_rate")
        check_at_least(0, self, "warmup_steps")
        _check(self, "final_fraction", lambda x: 0 <= x <= 1, "in [0, 1]")
        _check(self, "decay_fraction", lambda x: 0 < x <= 1, "in (0, 1]")
        check_fraction(self, "beta1", "beta2")
        _check(self, "weight_decay", lambda x: 0 <= x < math.inf, "at least 0 and finite")
        _check(self, "average_decay", lambda x: 0 < x < 1, "in (0, 1)")
        _check(self, "clip_norm", lambda x: x > 0, "above 0")
        # JSON has no infinity, and no norm exceeds the largest float32.
        object.__setattr__(self, "clip_norm", min(self.clip_norm, LARGEST_FLOAT))

    @property
    def peak(self) -> float:
        """The peak learning rate of these settings."""
        return self.learning_rate or LEARNING_RATES[self.optimizer]


@dataclass(frozen=True)
class MeshSizes:
    """Number of devices along each axis of a mesh (see `models.mesh`)."""

    data: int = 1
    """devices that divide the batch"""
    fsdp: int = 1
    """devices that divide the batch and the parameters"""
    expert: int = 1
    """devices that divide the batch and the experts of each layer"""
    tensor: int = 1
    """devices that divide the computation of each layer"""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_fields(self)
        check_at_least(1, self, "data", "fsdp", "expert", "tensor")

    @property
    def parts(self) -> int:
        """Number of parts into which the mesh divides a batch."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class Processes:
    """The processes that train a model together; without a coordinator, only this one."""

    needs: ClassVar[Needs] = {"process_timeout": (is_given("coordinator"),)}

    coordinator: str | None = None
    """HOST:PORT of process 0, if several processes train together, or "auto" on Slurm, Open MPI,
    Kubernetes or a TPU pod; None: this process alone"""
    num_processes: int | None = None
    """number of processes; None: the cluster's setting"""
    process_id: int | None = None
    """number of this process, from 0; None: the cluster's setting"""
    process_timeout: int = 300
    """seconds to wait until all processes have connected"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_at_least(1, self, "process_timeout")
        given = (self.num_processes, self.process_id)
        if self.coordinator in (None, "auto"):
            if given != (None, None):
                raise ValueError(
                    f"num_processes and process_id are {given}, but coordinator is "
                    f"{self.coordinator!r}; with them it must be the HOST:PORT of process 0"
                )
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator is {self.coordinator!r}; it must be HOST:PORT or auto")
        if self.num_processes is None or self.process_id is None:
            raise ValueError(
                f"num_processes and process_id are {given}; with a coordinator, set both of them"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id is {self.process_id}; it must be in 0 … {self.num_processes - 1}"
            )


@dataclass(frozen=True)
class RunConfig(Generic[Model]):
    """Config of a run with any objective and any batches: the model and the course of the run."""

    model: Model
    execution: Execution = field(default_factory=Execution)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshSizes | None = None
    """devices per axis: data=2,fsdp=4; None: data=N for all N available devices"""
    steps: int | None = 1000
    """total number of updates; None: only the minutes limit the run"""
    minutes: float | None = None
    """minutes of training, without compilation, evaluation and saving; None: only the steps limit
    the run"""
    seed: int = 0
    """seed for initialisation, data order, dropout and samples"""
    evaluate_every: int = 250
    """steps between evaluations on the held-out data"""
    checkpoint_every: int = 250
    """steps between checkpoints"""
    keep: int = 2
    """number of newest checkpoints to keep"""
    keep_every: int | None = None
    """also keep the checkpoints of steps that are multiples of this; None: only the newest"""
    non_finite: Literal["stop", "skip"] = "stop"
    """if the loss or the gradient is not finite: stop the run, or skip the update"""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """experiment trackers that receive the lines of metrics.jsonl"""
    profile: bool = False
    """write a trace of a few updates, for TensorBoard or Perfetto, into the run folder"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_fields(self)
        check_at_least(1, self, "evaluate_every", "checkpoint_every", "keep_every")
        _check(self, "steps", lambda x: x >= 1, "at least 1")
        if type(self.model) not in KINDS.values():
            raise ValueError(
                f"model is {shown(self.model)}; it must be the config of a model, such as "
                "DecoderConfig"
            )
        _check(self, "minutes", lambda x: 0 < x < 1e6, "above 0 and finite")
        if self.steps is None and self.minutes is None:
            raise ValueError("steps and minutes are None; one of them must limit the run")
        _check(self, "keep", lambda x: x >= 2, "at least 2, since the newest may be damaged")
        check_seed(self.seed)


@dataclass(frozen=True)
class TrainingConfig(RunConfig[Model]):
    """Base class of the configs of `jaxformer train`: everything that its losses depend on.

    The subclasses add the settings of the data and of its batches.
    """

    accumulate: int = 1
    """micro-batches per update"""
    held_out: float | None = None
    """fraction to hold out; None: 0.05 of the text, but at least 500 kB (or 0.1, if that is less)
    and at most 10 MB; 0.05 of the pairs, but at most 1,000"""
    label_smoothing: float = 0.0
    """share of the target probability that is spread over all tokens"""
    parse_special: bool = False
    """read special tokens that the text spells out, such as <|im_start|>, as these tokens; the run
    then reads prompts and evaluated texts in the same way. False: they are plain text"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "accumulate")
        check_fraction(self, "label_smoothing")
        _check(self, "held_out", lambda x: 0 < x <= 0.5, "in (0, 0.5]")


@dataclass(frozen=True)
class TextTraining(TrainingConfig[Model]):
    """Config of a run that reads windows of text and predicts each next token."""

    text_field: str = "text"
    """field or column with the text, in records (.jsonl, .parquet, hf:)"""
    batch_size: int = 16
    """windows per micro-batch"""
    window_length: int | None = None
    """tokens per window; None: max_length"""
    packing: Literal["windows", "documents"] = "windows"
    """windows: pieces of the text; documents: in a window, no document attends to another"""
    evaluation_windows: int = 128
    """held-out windows per evaluation, the same each time; the last one scores all the text too"""
    sample_tokens: int = 200
    """tokens in the sample that each evaluation writes; 0: no sample"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "batch_size", "evaluation_windows")
        check_at_least(0, self, "sample_tokens")
        if self.mesh is not None:
            parts = self.mesh.parts
            accepted = f"a multiple of data × fsdp × expert ({parts})"
            _check(self, "batch_size", lambda x: x % parts == 0, accepted)
        longest = self.model.max_length
        if longest < 2:
            raise ValueError(f"max_length is {longest}; training needs at least 2")
        if self.model.prefix:
            raise ValueError(
                f"prefix is {self.model.prefix}; it must be 0, because training predicts every "
                "token, and a model does not predict the tokens of a prefix"
            )
        if not self.model.causal:
            raise ValueError("causal is False; training on next tokens needs a causal model")
        _check(self, "window_length", lambda x: 1 <= x <= longest, f"in 1 … max_length ({longest})")

    @property
    def window(self) -> int:
        """Tokens per window."""
        return self.window_length or self.model.max_length


@dataclass(frozen=True)
class HiddenTraining(TextTraining[Model]):
    """Config of a run that reads windows of text and predicts tokens that are hidden in them."""

    mask_rate: float = 0.15
    """share of the tokens that are hidden"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        _check(self, "mask_rate", lambda x: 0 < x < 1, "in (0, 1)")


@dataclass(frozen=True)
class PairTraining(TrainingConfig[Model]):
    """Config of a run that reads sources and predicts the target of each."""

    batch_tokens: int = 2048
    """tokens per micro-batch on each side, padding included"""
    lengths: int = 6
    """number of different batch lengths; more of them need less padding and longer compilation; a
    run of N minutes has at most N + 2 unless this is given"""
    lowercase: bool = False
    """convert all text to lower case, on both sides"""
    evaluation_pairs: int = 128
    """held-out pairs per evaluation, the same each time; the last one scores all pairs too"""
    bleu_tokenize: str | None = None
    """sacrebleu's tokenizer for BLEU, such as zh for Chinese; None: 13a, its default"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "batch_tokens", "lengths", "evaluation_pairs")
        _check(self, "lengths", lambda x: x <= 8, "in 1 … 8")
        if self.bleu_tokenize is not None:
            from jaxformer.training.evaluate import bleu_metric

            bleu_metric(self.bleu_tokenize)  # raises ValueError for an unknown name


# Fields that may change when a run is resumed: its length and its reports, not its computation.
RESUMABLE = ("steps", "minutes", "evaluate_every", "evaluation_windows", "evaluation_pairs", "mesh")
RESUMABLE += ("bleu_tokenize", "checkpoint_every", "keep", "keep_every", "sample_tokens")
RESUMABLE += ("trackers", "profile", *Execution.__dataclass_fields__)

Section = ModelConfig | Execution | OptimizerConfig | LoraConfig


def differences(old: RunConfig | Section, new: RunConfig | Section) -> dict[str, tuple]:
    """Returns the fields that differ, also those in sections, by the flag's name: (old, new)."""
    changed = {}
    for name in old.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Section):
            changed |= differences(before, after)
        elif before != after:
            changed[name] = (before, after)
    return changed
