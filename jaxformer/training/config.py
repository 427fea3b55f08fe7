"""Configs of training runs: frozen dataclasses.

Every field here and in the model's config is a flag of `jaxformer train`. This module does not
import JAX, because the command line must start quickly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
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
from jaxformer.training.own_names import OwnNames

Model = TypeVar("Model", bound=ModelConfig)
# Numbers up to this limit fit into float32, which overflows only at twice the limit.
LARGEST_FLOAT = 2.0**127


def check_seed(seed: int) -> None:
    """Checks that a seed fits into 32 bits, so that different seeds give different random keys.

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
    """Raises ValueError unless a field is None or `is_accepted` returns True for its value."""
    value = getattr(config, name)
    if value is not None and not is_accepted(value):
        raise ValueError(f"{name} is {value}; it must be {accepted}")


class Inputs(NamedTuple):
    """Inputs of a run: either `text`, or `source` and an optional `target`.

    Attributes:
        text: Files and folders. If `text` and `source` are empty, the run reads Python's standard
            library.
        source: The file of source sentences, or of pairs of source and target sentences.
        target: The file of target sentences; None if `source` contains the pairs.
        origin: The checkpoint that provides the weights and the tokenizer; None for a new model.
    """

    text: tuple[Path, ...] = ()
    source: Path | None = None
    target: Path | None = None
    origin: Origin | None = None


# Default peak learning rate of each optimizer. Adafactor multiplies its updates by the size of the
# parameters, so it needs a larger rate (Shazeer & Stern 2018, §8 use up to 0.01). Lion needs a
# third of AdamW's rate (Chen et al. 2023, §5). Muon's updates are scaled to the size of those of
# Adam.
LEARNING_RATES = {"adamw": 6e-4, "lion": 2e-4, "adafactor": 0.01, "muon": 6e-4}


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer and of the learning rate's warm-up and decay.

    The default of `learning_rate` depends on the optimizer (see `LEARNING_RATES`).
    """

    needs: ClassVar[Needs] = {
        "decay_fraction": (is_one_of("schedule", "warmup-stable-decay"),),
        "beta1": (is_one_of("optimizer", "adamw", "lion", "muon"),),
        "beta2": (is_one_of("optimizer", "adamw", "lion", "muon"),),
    }

    optimizer: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), Lion (Chen et al. 2023), Adafactor (Shazeer & Stern 2018),
    or Muon (Jordan 2024). Muon updates all kernels except the output head; AdamW updates the
    rest"""
    schedule: Literal["cosine", "linear", "warmup-stable-decay"] = "cosine"
    """decay of the learning rate after the warm-up; warmup-stable-decay stays at the peak first"""
    learning_rate: float | None = None
    """peak learning rate"""
    warmup_steps: int = 100
    """steps in which the learning rate rises linearly from 0. A value of --steps or more counts as
    one less than --steps"""
    decay_fraction: float = 0.2
    """fraction of the run, at its end, in which warmup-stable-decay lowers the learning rate. With
    --steps, the decay never starts before the end of the warm-up"""
    final_fraction: float = 0.1
    """final learning rate as a fraction of the peak"""
    weight_decay: float = 0.1
    """weight decay of matrices; biases and scales have no weight decay"""
    beta1: float = 0.9
    """decay rate of the gradient's moving average; for Lion, weight of this average in the update
    (unused by Adafactor, and by Muon for kernels)"""
    beta2: float = 0.95
    """decay rate of the squared gradient's moving average; for Lion, of the gradient's moving
    average (unused by Adafactor, and by Muon for kernels)"""
    clip_norm: float = 1.0
    """largest global norm of the gradient; a gradient with a larger norm is scaled down"""
    ema_decay: float | None = None
    """decay rate of an exponential moving average of the weights. Evaluation, samples and loading
    use the average; default: no average"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_fields(self)
        check_positive(self, "learning_rate")
        check_at_least(0, self, "warmup_steps")
        _check(self, "final_fraction", lambda x: 0 <= x <= 1, "in [0, 1]")
        _check(self, "decay_fraction", lambda x: 0 < x <= 1, "in (0, 1]")
        check_fraction(self, "beta1", "beta2")
        _check(self, "weight_decay", lambda x: 0 <= x < math.inf, "at least 0 and finite")
        _check(self, "ema_decay", lambda x: 0 < x < 1, "in (0, 1)")
        _check(self, "clip_norm", lambda x: x > 0, "above 0")
        # JSON cannot represent infinity, and no norm exceeds the largest float32.
        object.__setattr__(self, "clip_norm", min(self.clip_norm, LARGEST_FLOAT))

    @property
    def peak(self) -> float:
        """The peak learning rate of these settings."""
        return self.learning_rate or LEARNING_RATES[self.optimizer]


@dataclass(frozen=True)
class MeshSizes:
    """Number of devices along each axis of a mesh (see `models.sharding.parameters`)."""

    data: int = 1
    """devices over which the batch is split"""
    fsdp: int = 1
    """devices over which the batch and the parameters are split"""
    expert: int = 1
    """devices over which the batch and the experts of each layer are split"""
    tensor: int = 1
    """devices over which the computation of each layer is split"""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_fields(self)
        check_at_least(1, self, "data", "fsdp", "expert", "tensor")

    @property
    def parts(self) -> int:
        """Number of shards of each batch on the mesh."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class Processes:
    """Settings of training with several processes. If `coordinator` is None, one process trains."""

    needs: ClassVar[Needs] = {"process_timeout": (is_given("coordinator"),)}

    coordinator: str | None = None
    """HOST:PORT of process 0, to train with several processes, or "auto" on Slurm, Open MPI,
    Kubernetes or a TPU pod; default: a single process"""
    num_processes: int | None = None
    """number of processes; default: detected from the cluster"""
    process_id: int | None = None
    """index of this process, from 0; default: detected from the cluster"""
    process_timeout: int = 300
    """seconds to wait for all processes to connect"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_at_least(1, self, "process_timeout")
        given = (self.num_processes, self.process_id)
        if self.coordinator in (None, "auto"):
            if given != (None, None):
                raise ValueError(
                    f"num_processes and process_id are {given}, but coordinator is "
                    f"{self.coordinator!r}; it must be the HOST:PORT of process 0"
                )
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f'coordinator is {self.coordinator!r}; it must be HOST:PORT or "auto"')
        if self.num_processes is None or self.process_id is None:
            raise ValueError(
                f"num_processes and process_id are {given}; with a coordinator, set both"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id is {self.process_id}; it must be in 0 … {self.num_processes - 1}"
            )


@dataclass(frozen=True)
class RunConfig(Generic[Model]):
    """Config of a run: the model, the length of the training and all training settings."""

    model: Model
    execution: Execution = field(default_factory=Execution)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshSizes | None = None
    """devices per axis, such as data=2,fsdp=4; default: data=N for all N available devices"""
    steps: int | None = 1000
    """total number of updates; default: only --max-minutes limits the run"""
    max_minutes: float | None = None
    """minutes of training. Compilation, evaluation and saving are excluded; default: only --steps
    limits the run"""
    seed: int = 0
    """seed for initialisation, data order, dropout and samples"""
    evaluate_every: int = 250
    """steps between evaluations on held-out data"""
    checkpoint_every: int = 250
    """steps between checkpoints"""
    max_to_keep: int = 2
    """number of newest checkpoints to keep"""
    keep_period: int | None = None
    """also keep checkpoints of steps that are multiples of this number; default: keep only the
    newest"""
    non_finite: Literal["stop", "skip"] = "stop"
    """action if the loss or the gradient is not finite: stop the run, or skip the update"""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """experiment trackers that receive the metrics"""
    profile: bool = False
    """write a trace of a few updates into the run folder, for TensorBoard or Perfetto"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_fields(self)
        check_at_least(1, self, "evaluate_every", "checkpoint_every", "keep_period")
        _check(self, "steps", lambda x: x >= 1, "at least 1")
        if type(self.model) not in KINDS.values():
            raise ValueError(
                f"model is {shown(self.model)}; it must be the config of a model, such as "
                "DecoderConfig"
            )
        _check(self, "max_minutes", lambda x: 0 < x < 1e6, "above 0 and finite")
        if self.steps is None and self.max_minutes is None:
            raise ValueError(
                "steps and max_minutes are both None; set at least one to limit the run"
            )
        _check(
            self,
            "max_to_keep",
            lambda x: x >= 2,
            "at least 2, because the newest checkpoint may be damaged",
        )
        check_seed(self.seed)


@dataclass(frozen=True)
class TrainingConfig(RunConfig[Model]):
    """Base class of the configs of `jaxformer train`, with the settings that all tasks share.

    Subclasses add the settings of the data and the batches.
    """

    gradient_accumulation_steps: int = 1
    """micro-batches per update"""
    validation_fraction: float | None = None
    """fraction of the data to hold out; default: 0.05, but at most 10 MB of text, 1,000 pairs or
    1,000 records. Of a text below 10 MB, the default is 500 kB or a tenth, whichever is less"""
    label_smoothing: float = 0.0
    """probability that label smoothing distributes uniformly over all tokens"""
    parse_special: bool = False
    """encode special tokens that are spelled out in the text, such as <|im_start|>, as special
    tokens. This also applies to prompts and evaluated texts. If false, they are ordinary text"""
    own: OwnNames = field(default_factory=OwnNames)

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "gradient_accumulation_steps")
        check_fraction(self, "label_smoothing")
        _check(self, "validation_fraction", lambda x: 0 < x <= 0.5, "in (0, 0.5]")


@dataclass(frozen=True)
class WindowTraining(TrainingConfig[Model]):
    """Base class of the configs of runs whose batches are sequences of one length."""

    batch_size: int = 16
    """sequences per micro-batch; for preferences, pairs of sequences"""
    window_length: int | None = None
    """tokens per sequence; default: max_length"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "batch_size")
        if (mesh := self.mesh) is not None:
            accepted = f"a multiple of data × fsdp × expert ({mesh.parts})"
            _check(self, "batch_size", lambda x: x % mesh.parts == 0, accepted)
        longest = self.model.max_length
        if longest < 2:
            raise ValueError(f"max_length is {longest}; training needs at least 2")
        if self.model.prefix:
            raise ValueError(
                f"prefix is {self.model.prefix}; it must be 0 for training, because a model "
                "does not predict the tokens of a prefix"
            )
        _check(self, "window_length", lambda x: 1 <= x <= longest, f"in 1 … max_length ({longest})")

    @property
    def window(self) -> int:
        """Tokens per sequence."""
        return self.window_length or self.model.max_length


@dataclass(frozen=True)
class TextTraining(WindowTraining[Model]):
    """Config of a run that trains on windows of text and predicts each next token."""

    text_field: str = "text"
    """field or column that holds the text, in records (.jsonl, .parquet, hf:)"""
    packing: Literal["windows", "documents"] = "windows"
    """windows: tokens also attend to other documents in a window; documents: tokens attend only to
    their own document"""
    evaluation_windows: int = 128
    """held-out windows per evaluation, the same each time. The last evaluation also scores all
    held-out text"""
    sample_tokens: int = 200
    """tokens in the sample that each evaluation writes; 0 to write no sample"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "evaluation_windows")
        check_at_least(0, self, "sample_tokens")


@dataclass(frozen=True)
class MaskedTokensTraining(TextTraining[Model]):
    """Config of a run that trains on windows of text and predicts masked tokens."""

    mask_rate: float = 0.15
    """fraction of tokens to mask"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        _check(self, "mask_rate", lambda x: 0 < x < 1, "in (0, 1)")


@dataclass(frozen=True)
class RecordTraining(WindowTraining[Model]):
    """Base class of the configs of runs that tune a checkpoint on records.

    Records that are longer than a sequence are cut.
    """

    chat_template: str | None = None
    """file with a chat template in jinja2, for records with messages; default: the template of the
    checkpoint or, if it has no template, a plain template, which is saved in the run folder"""
    record_weights: tuple[float, ...] = ()
    """one number for each file or dataset: how many times an epoch contains each training record
    of the file, such as 3 or 0.5; default: once"""
    evaluation_records: int = 128
    """held-out records per evaluation, the same each time. The last evaluation also scores all
    held-out records"""
    sample_tokens: int = 64
    """largest number of tokens in each of the five answers that each evaluation writes; 0 to write
    no answers"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "evaluation_records")
        check_at_least(0, self, "sample_tokens")
        check_positive(self, "record_weights")


@dataclass(frozen=True)
class TuningTraining(RecordTraining[Model]):
    """Config of a run that tunes a checkpoint on prompts with completions, or on messages."""

    loss_on: Literal["completions", "all"] = "completions"
    """tokens to learn: completions (what the assistant says), or all"""
    packing: Literal["records", "none"] = "records"
    """records: several records share a sequence, but do not attend to each other; none: each
    sequence has one record"""


@dataclass(frozen=True)
class PreferenceTraining(RecordTraining[Model]):
    """Config of a run that tunes a checkpoint on pairs of a better and a worse answer (DPO)."""

    dpo_beta: float = 0.1
    """β of DPO; a larger value keeps the model closer to the checkpoint"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        _check(self, "dpo_beta", lambda x: 0 < x < math.inf, "above 0 and finite")
        _check(self, "label_smoothing", lambda x: x == 0, "0, because DPO has no targets to smooth")


@dataclass(frozen=True)
class PairTraining(TrainingConfig[Model]):
    """Config of a run that trains on pairs and predicts the target from the source."""

    batch_tokens: int = 2048
    """tokens per micro-batch on each side, including padding"""
    lengths: int = 6
    """number of different batch lengths. With more lengths, batches have less padding and
    compilation takes longer. A run of N minutes uses at most N + 2 lengths by default"""
    lowercase: bool = False
    """convert the text of both sides to lower case"""
    evaluation_pairs: int = 128
    """held-out pairs per evaluation, the same each time. The last evaluation also scores all
    held-out pairs"""
    bleu_tokenize: str | None = None
    """sacrebleu's tokenizer for BLEU, such as zh for Chinese; default: 13a"""

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_at_least(1, self, "batch_tokens", "lengths", "evaluation_pairs")
        _check(self, "lengths", lambda x: x <= 8, "in 1 … 8")
        if self.bleu_tokenize is not None:
            from jaxformer.training.evaluate import bleu_metric

            # This call raises ValueError for an unknown tokenizer.
            bleu_metric(self.bleu_tokenize)


# Fields that may change when a run is resumed: the length of the run, its reports and its execution
# on devices.
RESUMABLE = (
    "steps",
    "max_minutes",
    "evaluate_every",
    "evaluation_windows",
    "evaluation_pairs",
    "evaluation_records",
    "mesh",
)
RESUMABLE += ("bleu_tokenize", "checkpoint_every", "max_to_keep", "keep_period", "sample_tokens")
RESUMABLE += ("trackers", "profile", *(x.name for x in fields(Execution)))

Section = ModelConfig | Execution | OptimizerConfig | LoraConfig | OwnNames


def differences(old: RunConfig | Section, new: RunConfig | Section) -> dict[str, tuple]:
    """Returns {flag: (old, new)} for each field that differs, including fields of sections."""
    changed = {}
    for name in old.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Section):
            changed |= differences(before, after)
        elif before != after:
            changed[name] = (before, after)
    return changed
