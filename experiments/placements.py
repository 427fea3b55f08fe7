"""Compiles training steps and decoding loops for absent machines.

    python experiments/placements.py gpu:h100:8
    python experiments/placements.py tpu:v5e:4x4 --meshes fsdp=16 --record placements-v5e
    python experiments/placements.py tpu:v5e:4x4 --decode

The report contains the memory per device, the communication and its theoretical minimum, and the
number of model FLOPs. `jaxformer doctor` prints the requirements for compiling for a target.
"""

import json
from dataclasses import replace

from record import Parser, conclude, run

from jaxformer.doctor.targets import parse_target, start_for
from jaxformer.models.config import Execution, preset

# Each value is (meshes for training, meshes for decoding).
MESHES = {
    "gpu:h100:8": (
        ("data=8", "fsdp=8", "data=2,fsdp=4", "fsdp=2,tensor=4", "tensor=8"),
        ("data=8", "data=2,tensor=4"),
    ),
    "tpu:v5e:4x4": (
        ("fsdp=16", "fsdp=4,tensor=4"),
        ("data=16", "data=4,tensor=4"),
    ),
}
# Each value is the batch size of a model. Sequences have `max_length` tokens.
MODELS = {"gpt2-1.5b": 64, "llama-1.1b": 32}
DECODED, ROWS = "gpt2-124m", 32
HOW = Execution(layers="scan", remat="dots")


def sizes(mesh: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


def main():
    parser = Parser(__doc__)
    parser.add_argument("target", choices=MESHES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", help="default: all meshes of the target")
    parser.add_argument(
        "--decode", action="store_true", help=f"compile the decoding loop of {DECODED}"
    )
    arguments = parser.parse_args()
    target = parse_target(arguments.target)
    start_for(target)
    from jaxformer.doctor.examine import (
        DoesNotFit,
        ProgramCase,
        examine_decoding,
        examine_step,
    )
    from jaxformer.models.kinds import build

    figures = []

    def add(name, mesh, examine, batch_size, execution):
        config = replace(preset(name), dtype="bfloat16")
        model = build(config, execution)
        case = ProgramCase(model, target, sizes(mesh), batch_size, config.max_length)
        try:
            found = examine(case)
        except DoesNotFit as error:
            found = {"mesh": sizes(mesh), "error": str(error)}
        figures.append({"preset": name, "what": examine.__name__, **found})
        print(json.dumps(figures[-1]), flush=True)

    meshes = arguments.meshes or MESHES[arguments.target][arguments.decode]
    for name in (DECODED,) if arguments.decode else arguments.models:
        for mesh in meshes:
            if arguments.decode:
                add(name, mesh, examine_decoding, ROWS, Execution())
            else:
                add(name, mesh, examine_step, MODELS[name], HOW)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
