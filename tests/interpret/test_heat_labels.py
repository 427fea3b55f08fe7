"""The labels of a heat map are thinned out, in Node. Skipped without Node."""

import json
import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.interpret.page_file import asset

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed")
PITCH = 12

cases = st.tuples(
    st.integers(1, 200), st.floats(0.5, 44), st.lists(st.integers(-1, 210), max_size=2)
)


def labels_of(cases):
    """Returns the indices of the labelled rows of each case: (rows, height of a row, wanted)."""
    source = re.sub(r"^import .*$", "", asset("heat_paint.js"), flags=re.MULTILINE)
    source += f"\nconst found = {json.dumps(cases)}.map((x) => labelled(...x));"
    source += "\nconsole.log(JSON.stringify(found));"
    command = [NODE, "--input-type=module"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@settings(max_examples=3)  # each example starts Node
@given(st.lists(cases, min_size=20, max_size=20))
def test_labels_of_heat_map_do_not_overlap_and_include_the_selected_rows(cases):
    for (num, size, wanted), labels in zip(cases, labels_of(cases), strict=True):
        kept = {i for i in wanted if 0 <= i < num}
        assert kept <= set(labels) <= set(range(num))
        others = sorted(set(labels) - kept)
        for i in others:
            assert all(abs(i - j) * size >= PITCH - 0.2 for j in labels if j != i)
        # If there is space, every row has a label nearby.
        step = max(1, PITCH / size)
        assert len(labels) >= num / (2 * step + 1) - 2
        if size >= PITCH:
            assert sorted(labels) == list(range(num))
