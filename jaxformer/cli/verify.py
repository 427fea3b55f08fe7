"""`jaxformer verify RUN`: a certificate of what a trained model provably does."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxformer.cli.arguments import parse
from jaxformer.cli.opened import RunArguments, opened
from jaxformer.training.config import check_seed


@dataclass(frozen=True)
class VerifyArguments(RunArguments):
    """Hold a run to its properties, on this machine; exit status 0 only if all hold, else 1.
    certificate.json and certificate.png are written into the folder."""

    length: int | None = None
    """tokens per row on which they are tested; None: the model's max_length, but at most 128"""
    seed: int = 0
    """seed for the rows' tokens"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""

    def __post_init__(self):
        check_seed(self.seed)


def main(argv: list[str]) -> int:
    """Load, examine, print, draw."""
    arguments = parse(VerifyArguments, "verify", argv)
    with opened(arguments) as checkpoint:
        holds = _certify(checkpoint, arguments)
    return 0 if holds else 1


def _certify(checkpoint, arguments: VerifyArguments) -> bool:
    from jaxformer.artifacts.run import write_whole
    from jaxformer.verify.certificate import asked_of, examine
    from jaxformer.verify.picture import draw_dependency
    from jaxformer.verify.subject import subject_of

    model, variables, _ = checkpoint
    subject = subject_of(model, variables, length=arguments.length, seed=arguments.seed)
    properties = []
    for name in asked_of(subject):
        found = examine(subject, name)
        properties.append(found)
        if not arguments.json:
            print(_line(found), flush=True)
    holds = all(found.holds for found in properties)
    certificate = {
        "run": arguments.run,
        "holds": holds,
        "length": subject.length,
        "seed": subject.seed,
        "properties": [found._asdict() for found in properties],
    }
    folder = Path(arguments.run) if Path(arguments.run).is_dir() else Path()
    write_whole(folder / "certificate.json", json.dumps(certificate, indent=2) + "\n")
    draw_dependency(
        subject.dependency, subject.rule, folder / "certificate.png", f"{arguments.run}"
    )
    if arguments.json:
        print(json.dumps(certificate))
    else:
        kept = sum(found.holds for found in properties)
        print(f"{kept} of {len(properties)} properties hold   picture: {folder}/certificate.png")
    return holds


def _line(found) -> str:
    where = f"; first at {found.layer}" if found.layer else ""
    sign = "holds" if found.holds else "FAILS"
    return f"{sign}  {found.name:22} {found.seconds:6.1f} s  {found.detail}{where}"
