"""What a score is judged by: compressors, and lines that could be known by heart."""

import gzip
import lzma
import shutil
import subprocess

import pytest

from jaxformer.training.corpus import standard_library
from jaxformer.training.held_out import baselines
from tests.errors import error_of


def test_baselines_are_those_of_the_programs():
    documents = list(standard_library())[:20]
    data = "".join(document.text for document in documents).encode()
    bits = baselines(documents)
    extreme = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    assert bits["gzip"] == 8 * len(gzip.compress(data, 9)) / len(data)
    assert bits["xz"] == 8 * len(extreme) / len(data)
    assert len(gzip.compress(data, 9)) < len(gzip.compress(data, 6))  # so the levels matter here
    assert len(extreme) < len(lzma.compress(data, preset=9))
    for program, options in ("gzip", ["-9"]), ("xz", ["-9e"]):
        if shutil.which(program):
            command = [program, *options, "--stdout"]
            output = subprocess.run(command, input=data, capture_output=True, check=True).stdout
            assert bits[program] == pytest.approx(8 * len(output) / len(data), rel=5e-3)


def test_baselines_of_no_text_are_refused():
    assert error_of(baselines, []) == "held_out: there is no text to compress"
