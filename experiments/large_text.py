"""Measures the memory of training on a text larger than memory, and the speed of its batches.

    python experiments/large_text.py --gigabytes 4 --record large-text

The script writes a random text with word frequencies by Zipf's law, half as a .txt file and half as
records of a .jsonl file. `jaxformer train` prepares the text and makes a few updates in a separate
process, whose memory is sampled. The memory for a text of 5 MB serves as the baseline, because the
program and the model need this memory for any text. The script reports anonymous memory and file
pages separately. The memory-mapped token file counts as file pages, which the system can reclaim.
Finally, the script measures the speed of reading batches for GPT-2 124M.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from record import FOLDER, Parser, at_least, conclude, run

from jaxformer.artifacts.run import RunFolder
from jaxformer.training.data.tokens import open_tokens
from jaxformer.training.data.windows import WindowBatches

WORDS = 50_000
# The script draws `CHUNK` words at a time. A record of the .jsonl file has `RECORD` words.
CHUNK = 100_000
RECORD = 200
TRAIN = (
    "--preset tiny --vocab-size 8192 --evaluate-every 1000 --checkpoint-every 1000 "
    "--evaluation-windows 16 --sample-tokens 0 --steps"
).split()
START = "import sys; from jaxformer.cli import main; sys.exit(main())"
GPT2 = {"length": 1024, "batch_size": 8}
# The memory is sampled every SETTLE seconds.
SETTLE = 0.1


def make_text(folder: Path, num_bytes: float, seed: int = 0) -> int:
    """Writes half of the text to text.txt and half to records.jsonl; returns the bytes of both."""
    random = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    lengths = random.integers(1, 12, WORDS)
    words = np.array(["".join(random.choice(letters, length)) for length in lengths], object)
    probabilities = 1 / np.arange(1, WORDS + 1)
    ends = np.cumsum(probabilities / probabilities.sum())

    def drawn(number: int) -> list[str]:
        places = np.searchsorted(ends, random.random((number, RECORD)))
        return [
            " ".join(words_of_record) for words_of_record in words[np.minimum(places, WORDS - 1)]
        ]

    folder.mkdir(parents=True)
    sizes = []
    for name, line in (("text.txt", str), ("records.jsonl", _record)):
        with (folder / name).open("w") as file:
            while file.tell() < num_bytes / 2:
                file.writelines(f"{line(text)}\n" for text in drawn(CHUNK // RECORD))
            sizes.append(file.tell())
    return sum(sizes)


def _record(text: str) -> str:
    return json.dumps({"text": text})


def train(text: Path, out: Path, steps: int) -> dict:
    """Returns the time (s) and the peak memory (MB) of the preparation and of the training."""
    command = [sys.executable, "-c", START, "train", str(text), "--out", str(out)]
    peaks = {part: {"seconds": 0.0} for part in ("preparation", "training")}
    begin, prepared = time.perf_counter(), RunFolder(out).baselines
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen([*command, *TRAIN, str(steps)], stdout=log, stderr=log)
        while process.poll() is None:
            peak = peaks["training" if prepared.exists() else "preparation"]
            for name, size in memory(process.pid).items():
                peak[name] = max(peak.get(name, 0), size)
            now = time.perf_counter()
            peak["seconds"], begin = peak["seconds"] + now - begin, now
            time.sleep(SETTLE)
    if process.returncode:
        said = Path(log.name).read_text().strip().rpartition("\n")[2]
        raise ValueError(f"training on {text} ended with status {process.returncode}: {said}")
    return peaks


def memory(pid: int) -> dict[str, float]:
    """Returns the current anonymous memory and file pages of a process in MB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = dict(line.split(":", 1) for line in lines)
    names = {"anonymous": "RssAnon", "files": "RssFile"}
    return {
        ours: int(found[name].split()[0]) / 1e3 for ours, name in names.items() if name in found
    }


def input_speed(out: Path, seconds: float = 10) -> float:
    """Returns how many tokens per second are read in batches for GPT-2 124M."""
    batches = WindowBatches(open_tokens(RunFolder(out).train_tokens).ids, **GPT2)
    next(batches)
    count, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        count += next(batches).targets.size
    return count / passed


def consumed() -> float:
    """Returns tokens per second of a GPT-2 124M training step, as recorded by bench_train.py."""
    figures = json.loads((FOLDER / "train-cpu.json").read_text())["figures"]
    steps = [x["jaxformer"] for x in figures if x["size"].startswith("124m")]
    return max(step["tokens_per_second"] for step in steps)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=at_least(1), default=50)
    parser.add_argument(
        "--folder", type=Path, help="folder for the texts; default: a temporary folder"
    )
    arguments = parser.parse_args()
    if not 0.01 <= arguments.gigabytes <= 1000:
        raise ValueError(f"--gigabytes is {arguments.gigabytes}; it must be between 0.01 and 1000")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        sizes, peaks = {}, {}
        for name, size in (("small", 5e6), ("large", arguments.gigabytes * 1e9)):
            sizes[name] = make_text(folder / name, size)
            peaks[name] = train(folder / name, folder / f"run-{name}", arguments.steps)
            print(name, sizes[name], peaks[name], flush=True)
        beyond = {
            part: peaks["large"][part]["anonymous"] - peaks["small"][part]["anonymous"]
            for part in peaks["large"]
        }
        delivered, needed = input_speed(folder / "run-large"), consumed()
        stream = open_tokens(RunFolder(folder / "run-large").train_tokens)
        figures = {"bytes": sizes, "peak_mb": peaks, "anonymous_mb_beyond_small": beyond}
        figures |= {"tokens": len(stream.ids), "documents": stream.num_documents}
        figures |= {"tokens_per_second": {"input": delivered, "gpt2-124m step": needed}}
        conclude({**figures, "ratio": delivered / needed}, arguments.record)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    run(main)
