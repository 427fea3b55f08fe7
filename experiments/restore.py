"""Saves checkpoints on 1, 2, 4 and 8 devices and loads each on every number of devices.

    python experiments/restore.py
    python experiments/restore.py --kinds decoder

The devices are simulated on the CPU. For each model and each number of devices, the script makes
five updates and saves a checkpoint. After each load it compares the parameters and the optimizer
state bit by bit, and the loss of the next update.
"""

import tempfile
from pathlib import Path

import jax
import meshes  # Importing `meshes` sets the number of devices.
import numpy as np
from record import Parser, conclude, run

import jaxformer as jf
from jaxformer.artifacts.checkpoint import Checkpoints, CheckpointWriter
from jaxformer.models.config import KINDS
from jaxformer.models.sharding.parameters import make_mesh
from jaxformer.training.mesh import place_batch
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import TrainState, init_on, make_step

SIZES = {
    1: {},
    2: {"fsdp": 2},
    4: {"fsdp": 2, "tensor": 2},
    8: {"data": 2, "fsdp": 2, "tensor": 2},
}
UPDATES = 5


class On:
    """Trains a model on `devices` devices, and loads its checkpoints."""

    def __init__(self, kind: str, devices: int):
        self.mesh = make_mesh(SIZES[devices], jax.devices()[:devices])
        self.model = jf.build(meshes.CONFIGS[kind])
        self.optimizer = make_optimizer(meshes.RECIPE)
        with jax.set_mesh(self.mesh):
            self._batch = place_batch(meshes.batch_of(self.model.config), self.mesh)
            self._step = make_step(self.model, self.optimizer)

    def fresh(self) -> TrainState:
        with jax.set_mesh(self.mesh):
            return init_on(self.mesh, self.model, self.optimizer, 0)

    def update(self, state: TrainState) -> tuple[TrainState, float]:
        with jax.set_mesh(self.mesh):
            state, measured = self._step(state, self._batch, np.float32(1e-3))
            return state, float(measured.loss)

    def load(self, folder: Path) -> TrainState:
        state = self.fresh()
        step, *parts, _ = Checkpoints(folder).restore(*state.parts())
        where = jax.tree.map(lambda x: x.sharding, state)
        return jax.device_put(state.restored(step, *parts), where)


def compare(kind: str) -> list[dict]:
    """Compares saved and loaded states for each pair of device counts (saving, loading)."""
    found, all_of_them = [], {devices: On(kind, devices) for devices in SIZES}
    for saved, on in all_of_them.items():
        state = on.fresh()
        for _ in range(UPDATES):
            state, _ = on.update(state)
        with tempfile.TemporaryDirectory() as folder:
            with CheckpointWriter(Path(folder)) as writer:
                writer.save(UPDATES, *state.parts(), {})
            kept = jax.device_get(state.parts())
            _, wanted = on.update(state)
            for loaded, other in all_of_them.items():
                state = other.load(Path(folder))
                same = jax.tree.map(np.array_equal, kept, jax.device_get(state.parts()))
                _, loss = other.update(state)
                figures = {"kind": kind, "saved on": saved, "loaded on": loaded}
                figures["bitwise equal"] = all(jax.tree.leaves(same))
                figures["next loss"] = abs(loss / wanted - 1)
                found.append(figures)
    return found


def main():
    parser = Parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    figures = []
    for kind in arguments.kinds:
        some = compare(kind)
        equal = all(pair["bitwise equal"] for pair in some)
        worst = max(pair["next loss"] for pair in some)
        print(
            f"{kind}: {len(some)} pairs of device counts (saved on, restored on); restored states "
            f"are bitwise equal: {equal}; next losses differ by at most {worst:.1e}",
            flush=True,
        )
        figures += some
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
