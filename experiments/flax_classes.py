"""Compares the outputs of transformers' Flax models and of jaxformer for the same checkpoints.

    python experiments/flax_classes.py --python flax/bin/python --record flax-classes-cpu

transformers 5 has no Flax classes. `--python` therefore names an interpreter with transformers 4,
flax and an older JAX. The docstring of `flax_models.py` contains the installation command. The
interpreter at `--python` saves tiny models with random weights, and their outputs for random
tokens.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from record import Parser, conclude, run

PEER = Path(__file__).with_name("flax_models.py")


def compared(folder: Path) -> dict:
    """Compares the outputs of a loaded model with the saved outputs of the Flax class.

    Returns the largest difference, the standard deviation of the saved outputs, and the number of
    equal greedy tokens.

    The Flax class of Mistral attends to `sliding_window + 1` tokens, the PyTorch class to
    `sliding_window`. For a model with a window, this function therefore also compares the outputs
    of a model whose window is one token longer.

    Args:
        folder: The folder of a saved model, with input tokens and outputs in outputs.npz.
    """
    import numpy as np

    import jaxformer as jf

    model, variables, _ = jf.load(folder)
    saved = np.load(folder / "outputs.npz")
    tokens = saved["tokens"].astype(np.int32)
    source = {"source": saved["source"].astype(np.int32)} if "source" in saved else {}
    is_classifier = getattr(model.config, "num_labels", 0) and not model.config.transform
    method = "classify" if is_classifier else None if "logits" in saved else "encode"
    theirs = saved["logits" if "logits" in saved else "last_hidden_state"]

    def difference(model) -> float:
        ours = model.apply(variables, tokens, **source, method=method)
        return float(abs(np.asarray(ours) - theirs).max())

    figures = {"difference": difference(model), "deviation": float(theirs.std())}
    if window := getattr(model.config, "window", None):
        wider = jf.build(replace(model.config, window=window + 1))
        figures["difference_of_wider_window"] = difference(wider)
    if "greedy" in saved:
        settings = {"sampler": jf.Sampler(temperature=0.0), "constraints": jf.Constraints()}
        out = jf.generate(model, variables, tokens[:, :4], max_new_tokens=6, **settings)
        figures["same_greedy_tokens"] = int((out.tokens == saved["greedy"]).sum())
        figures["greedy_tokens"] = saved["greedy"].size
    return figures


def main():
    parser = Parser(__doc__)
    parser.add_argument(
        "--python",
        required=True,
        metavar="PATH",
        help="Python interpreter whose transformers has the Flax classes",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(arguments.python).absolute()), str(PEER), folder]
        written = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if written.returncode:
            raise ValueError(f"{' '.join(command)} failed with exit status {written.returncode}")
        versions = json.loads(written.stdout.splitlines()[-1])
        cases = {path.name: compared(path) for path in sorted(Path(folder).iterdir())}
    for name, figures in cases.items():
        print(f"{name:22} {figures}", file=sys.stderr)
    conclude({"peer": versions, "cases": cases}, arguments.record)


if __name__ == "__main__":
    run(main)
