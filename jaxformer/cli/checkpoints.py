"""Loads the checkpoint that a command line names, by RUN or by --init-from."""

import sys
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxformer.artifacts.run import Origin, RunFolder, keep
from jaxformer.artifacts.spelled_tokens import report_special_tokens, spelled_tokens
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_copies import lowers_case, parsing_special
from jaxformer.cli.flags import IgnoredOptions, Switch, positional
from jaxformer.models.config import architecture_name
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.runtime import start_jax
from jaxformer.terminal import say
from jaxformer.training.config import MeshSizes, PairTraining, TrainingConfig
from jaxformer.training.own_names import read_own_names, require_trust
from jaxformer.training.presets import (
    check_head,
    check_same_model,
    check_tokenizer,
    fine_tuning,
)

if TYPE_CHECKING:  # These modules import JAX.
    import jax

    from jaxformer.artifacts.saved import Checkpoint, Stored


@dataclass(frozen=True)
class RunArguments:
    """Arguments of every subcommand that uses a model."""

    run: Annotated[str, positional("RUN")]
    """the model: a run folder, a folder that jf.save wrote, a folder in Hugging Face format or a
    hub id"""
    mesh: MeshSizes | None = field(default=None, kw_only=True)
    """mesh to shard the model over: the number of devices along each axis, such as
    data=2,tensor=4; default: one device"""
    trust_code: Switch = field(default=False, kw_only=True)
    """import the model's user-defined functions and classes from the current directory or the
    Python path; use this only for a model that you trust, because importing a module runs its
    code"""

    def adapted(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """Returns the checkpoint, changed according to the arguments of the subcommand."""
        return checkpoint


@dataclass(frozen=True)
class TextArguments(RunArguments):
    """Arguments of every subcommand that reads a text with the model's tokenizer."""

    parse_special: Switch = field(default=False, kw_only=True)
    """read special tokens in the text, such as <|im_start|>, as single tokens instead of plain
    text; always on for a run that was trained with --parse-special"""

    def adapted(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """Returns the checkpoint; with --parse-special, its tokenizer parses special tokens."""
        checkpoint = super().adapted(checkpoint)
        if checkpoint.tokenizer is None or not self.parse_special:
            return checkpoint
        return checkpoint._replace(tokenizer=parsing_special(checkpoint.tokenizer))


@dataclass(frozen=True)
class DecodingArguments(TextArguments):
    """Arguments of every subcommand that generates text."""

    ignore_generation_config: IgnoredOptions = field(default=(), kw_only=True)
    """option of the checkpoint's generation_config.json to ignore, for example because it is not
    implemented; may be repeated"""

    def adapted(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """Returns the checkpoint without the generation options in --ignore-generation-config."""
        from jaxformer.hub.generation import without_options

        checkpoint = super().adapted(checkpoint)
        model = checkpoint.model
        generation = without_options(model.generation, self.ignore_generation_config)
        return checkpoint._replace(model=model.clone(generation=generation))


@contextmanager
def load_model(arguments: RunArguments) -> Generator["Checkpoint"]:
    """Starts JAX and loads the model.

    With --mesh, the model is sharded over the mesh, and the `with` block runs inside
    `jax.set_mesh`.

    Args:
        arguments: The arguments of the subcommand.

    Yields:
        The `Checkpoint`.
    """
    start_jax()
    import jax

    from jaxformer.hub.load import load
    from jaxformer.models.sharding.parameters import make_mesh

    mesh = None if arguments.mesh is None else make_mesh(asdict(arguments.mesh))
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        checkpoint = load(arguments.run, mesh=mesh, trust_code=arguments.trust_code)
        yield arguments.adapted(checkpoint)


def report_special(tokenizer: Tokenizer, where: str, parts: Iterable[str]) -> None:
    """Prints to standard error how the special tokens that occur in a text are encoded.

    Args:
        tokenizer: The tokenizer that encodes the text.
        where: The name of the text, such as "the prompt".
        parts: Strings of any length, whose concatenation is the text.
    """
    print_special(tokenizer, where, spelled_tokens(tokenizer, parts))


def print_special(tokenizer: Tokenizer, where: str, found: Counter[str]) -> None:
    """Prints the report of `report_special`, given the result `found` of `spelled_tokens`."""
    if (line := report_special_tokens(tokenizer, found, where)) is not None:
        say(line, file=sys.stderr)


class Base(NamedTuple):
    """A checkpoint that has been opened, but whose parameters have not been read.

    Attributes:
        path: The checkpoint's folder.
        stored: The config, the tokenizer and a function that reads the parameters.
        training: The default settings of a run that starts from the checkpoint.
        step: The step of the newest checkpoint, or None if the folder is not a run.
    """

    path: Path
    stored: "Stored"
    training: TrainingConfig
    step: int | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None."""
        return self.stored.tokenizer

    def accept(self, training: TrainingConfig) -> None:
        """Raises ValueError if a run with the given settings cannot start from the checkpoint."""
        from jaxformer.models.kinds import build
        from jaxformer.models.lora import adapted_maps
        from jaxformer.models.parameters import shape_tree

        check_same_model(self.path, self.training, training)
        check_tokenizer(self.path, self.tokenizer, training)
        if training.lora.lora_rank is not None:
            adapted_maps(shape_tree(build(training.model)), training.lora)

    def ignoring(self, names: Iterable[str]) -> "Base":
        """Returns the checkpoint without the named generation options.

        Raises:
            ValueError: a named option is unknown, or the run generates samples and still has an
                option that is not implemented.
        """
        generation = usable_generation(self.stored.generation, names, self.training)
        return self._replace(stored=self.stored._replace(generation=generation))

    def keep(self, folder: RunFolder, training: TrainingConfig) -> None:
        """Copies the tokenizer and, if necessary, the checkpoint into the folder of a new run.

        If the new run trains an adapter on a checkpoint of another run, the checkpoint is copied,
        because the other run may delete it when that run continues training.
        """
        # pyrefly: ignore[missing-attribute] (`accept` raises if there is no tokenizer)
        self.tokenizer.save(folder.tokenizer)
        if training.lora.lora_rank is not None and self.step is not None:
            keep(self.path, folder.base, self.step)

    def read(self, mesh: "jax.sharding.Mesh | None") -> tuple[dict, Origin]:
        """Reads the parameters.

        Args:
            mesh: The mesh over which to shard the parameters. If None, they are on one device.

        Returns:
            The parameters, and the `Origin` to store in config.json.

        Raises:
            ValueError: Another process has continued the base run since the checkpoint was opened.
        """
        from jaxformer.artifacts.tensors import compute_digest
        from jaxformer.models.kinds import build
        from jaxformer.models.sharding.parameters import parameter_shapes

        params = self.stored.read(parameter_shapes(build(self.stored.config), mesh))
        if _newest_step(self.path) != self.step:
            raise ValueError(
                f"{self.path} was trained further while it was read; run the command again"
            )
        stored, special = self.stored, getattr(self.tokenizer, "special", None)
        special = None if special is None else asdict(special)
        digest = compute_digest(params)
        about = (stored.model_type, special, stored.generation, stored.checkpoint_dtype)
        return params, Origin(self.path, digest, *about)


def usable_generation(
    generation: GenerationDefaults, names: Iterable[str], training: TrainingConfig
) -> GenerationDefaults:
    """Returns a checkpoint's generation settings for the samples of a run (see `Base.ignoring`)."""
    from jaxformer.decoding.constraints import check_supported
    from jaxformer.hub.generation import without_options

    generation = without_options(generation, names)
    # The runs of encoders do not generate samples.
    if not training.model.bidirectional:
        check_supported(generation)
    return generation


def open_base(source: str, model: str | None, preset: str | None, trust_code: bool) -> Base:
    """Opens the checkpoint that --init-from names.

    Args:
        source: The value of --init-from.
        model: The value of --model, or None.
        preset: The value of --preset, or None.
        trust_code: The value of --trust-code.

    Raises:
        ValueError: The checkpoint does not exist, does not match --model, or is a classifier, or
            it has user-defined functions and --trust-code is missing.
    """
    start_jax()
    from jaxformer.hub.load import fetched, opened

    path = fetched(source).absolute()
    stored = opened(path)
    if "layers" in stored.own:
        raise ValueError(
            f"{path} contains a model with its own layers, which flags cannot describe; train it "
            "in Python with jaxformer.training.fit.fit"
        )
    own = read_own_names(stored.own, path / "config.json")
    require_trust(own, trust_code, path / "config.json")
    stored = stored._replace(config=own.without_replaced(stored.config))
    check_head(path, stored.config, stored.model_type)
    kind = architecture_name(stored.config)
    if model not in (None, kind):
        raise ValueError(f"--model is {model!r}, but {path} has a model of the architecture {kind}")
    training = replace(fine_tuning(kind, stored.config, preset), own=own)
    if stored.tokenizer is not None:
        training = replace(training, parse_special=stored.tokenizer.parses_special)
        if isinstance(training, PairTraining):
            training = replace(training, lowercase=lowers_case(stored.tokenizer))
    return Base(path, stored, training, _newest_step(path))


def _newest_step(path: Path) -> int | None:
    """Returns the step of a run's newest checkpoint, or None if the path is not a run."""
    from jaxformer.artifacts.checkpoint import Checkpoints

    return max(Checkpoints(RunFolder(path).checkpoints).steps(), default=None)


def restore_origin(
    folder: RunFolder, origin: Origin, config: TrainingConfig, mesh: "jax.sharding.Mesh | None"
) -> dict | None:
    """Returns the initial parameters of a resumed run, sharded over a mesh.

    Returns None if the run's own checkpoints contain all parameters.
    """
    from jaxformer.artifacts.checkpoint import Checkpoints
    from jaxformer.hub.load import origin_params
    from jaxformer.models.kinds import build
    from jaxformer.models.sharding.parameters import parameter_shapes

    if config.lora.lora_rank is None and Checkpoints(folder.checkpoints).steps():
        return None
    return origin_params(origin, parameter_shapes(build(config.model), mesh), folder)
