"""`jaxformer doctor`: what is here, and what a model needs, as a table and as JSON."""

import json

import jax
import pytest

from jaxformer.cli import main
from tests.slow import mostly_slow


def printed(capsys, *words) -> str:
    assert main(["doctor", *words]) == 0
    return capsys.readouterr().out


def test_it_says_what_is_here(capsys):
    found = json.loads(printed(capsys, "--json"))
    assert found["versions"]["jax"] == jax.__version__
    assert len(found["devices"]) == jax.device_count() and found["memory"] > 0
    table = printed(capsys)
    assert jax.__version__ in table and "devices" in table
    assert [line for line in table.splitlines() if "not installed" in line] or not found["missing"]


HOW = ("--preset", "tiny", "--target", "cpu:1", "--batch-size", "2", "--length", "16")


@pytest.mark.parametrize("what", mostly_slow(["decode", "step"], "step"))
def test_it_says_what_a_model_needs(what, capsys):
    """Of one device nothing is exchanged, and all parameters are there, in float32."""
    words = (*HOW, *["--decode"] * (what == "decode"))
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["target"] == "cpu:1" and found["exchanges"] == {}
    if what == "step":
        assert found["memory"]["optimizer"] == 2 * found["memory"]["parameters"] + 4
        assert found["flops"] == pytest.approx(
            3 * 2 * 2 * 16 * (2 * 12 * 64**2 + 512 * 64), rel=0.1
        )
    else:
        assert found["cache_copies_per_token"] == 0
    capsys.readouterr()
