"""`jaxformer verify RUN`: checks properties of a model and writes the results to a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxformer.artifacts.files import json_text, write_json
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import RunArguments, load_model
from jaxformer.cli.flags import Switch
from jaxformer.terminal import say
from jaxformer.training.config import check_seed

if TYPE_CHECKING:
    from jaxformer.verify.certificate import Property


@dataclass(frozen=True)
class VerifyArguments(RunArguments):
    """Check properties of a model, such as causality, by running the model.

    The exit status is 0 if all properties hold, else 1. The results are written to certificate.json
    and certificate.png in the folder RUN or, for a hub id, in the current folder.
    """

    length: int | None = None
    """tokens per sequence; default: the model's max_length, but at most 128"""
    batch_size: int | None = None
    """batch size of every forward pass; default: 1, or the size that a property needs (at most
    32)"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the activations; replaces the dtype in the model's config"""
    seed: int = 0
    """random seed for the tokens of the sequences"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_seed(self.seed)


def main(argv: list[str]) -> int:
    """Loads the model, checks its properties, and prints, writes and draws the results."""
    arguments = parse(VerifyArguments, "verify", argv)
    names = ("length", "seed", "batch_size", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    with load_model(arguments) as (model, variables, _):
        from jaxformer.verify.certificate import applicable_properties, check_property
        from jaxformer.verify.certified_model import certified_model
        from jaxformer.verify.comparison import draw_dependency

        subject = certified_model(model, variables, **options)
        properties = []
        for name in applicable_properties(subject):
            properties.append(check_property(subject, name))
            if not arguments.json:
                say(_line(properties[-1]))
    number = sum(x.holds for x in properties)
    holds = number == len(properties)
    certificate = {"run": arguments.run, "holds": holds, **options, "length": subject.length}
    certificate |= {"properties": [x._asdict() for x in properties]}
    folder = Path(arguments.run) if Path(arguments.run).is_dir() else Path()
    write_json(folder / "certificate.json", certificate)
    draw_dependency(subject.dependency, subject.rule, folder / "certificate.png", arguments.run)
    if arguments.json:
        say(json_text(certificate))
    else:
        say(f"{number} of {len(properties)} properties hold; picture: {folder}/certificate.png")
    return 0 if holds else 1


def _line(found: "Property") -> str:
    where = f"; first failure: {found.layer}" if found.layer else ""
    sign = "holds" if found.holds else "FAILS"
    return f"{sign}  {found.name:22} {found.seconds:6.1f} s  {found.detail}{where}"
