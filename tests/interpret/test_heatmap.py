"""The scale and the pooled cells of the page's heat maps, in Node. Skipped without Node."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.interpret.page_file import asset

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed")
CASES = 12


def run(cases):
    """Returns [scale, pooled values] of each case: (rows, columns, values, height, width)."""
    source = re.sub(r"^import .*$", "", asset("heat_cells.js"), flags=re.MULTILINE)
    source += f"""
    const found = {json.dumps(cases)}.map(([rows, columns, values, height, width]) => {{
      const matrix = {{ rows, columns, values: Float32Array.from(values) }};
      return [fullColour(matrix), Array.from(pooled(matrix, height, width).values)];
    }});
    console.log(JSON.stringify(found));"""
    command = [NODE, "--input-type=module"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def expected(rows, columns, values, height, width):
    """Returns the same, by loops over the cells of each pooled cell."""
    table = np.float32(values).reshape(rows, columns)
    high, wide = min(rows, height), min(columns, width)
    places = [np.arange(n) * size // n for n, size in ((rows, high), (columns, wide))]
    out = [
        max(table[np.ix_(places[0] == row, places[1] == column)].ravel().tolist(), key=abs)
        for row in range(high)
        for column in range(wide)
    ]
    return [float(np.abs(table).max()), out]


sizes = st.tuples(*(st.integers(1, 90) for _ in range(4)), st.integers(0, 2**32 - 1))


def drawn(case):
    rows, columns, height, width, seed = case
    values = np.random.default_rng(seed).normal(size=rows * columns)
    return rows, columns, np.float32(values).tolist(), height, width


@settings(max_examples=3)  # each example starts Node
@given(st.lists(sizes, min_size=CASES, max_size=CASES))
def test_heat_map_pooling_preserves_the_largest_magnitudes(cases):
    cases = [drawn(case) for case in cases]
    for found, case in zip(run(cases), cases, strict=True):
        scale, values = expected(*case)
        assert found[0] == pytest.approx(scale, abs=0)
        np.testing.assert_array_equal(found[1], values)


def test_a_large_negative_cell_survives_pooling_of_a_heat_map():
    """In a map of 5,000 cells, wherever the cell is."""
    cases = []
    for place in (0, 1, 36, 37, 2500, 4999):
        values = np.full(5000, 0.25)
        values[place] = -8.0
        cases.append((50, 100, values.tolist(), 10, 10))
    for scale, values in run(cases):
        assert scale == 8.0 and values.count(-8.0) == 1 and values.count(0.25) == 99
