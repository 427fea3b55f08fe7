"""Models that only leak in large batches, in long sequences or in bfloat16."""

import json

import jax.numpy as jnp
import pytest

import jaxformer as jf
from jaxformer.verify import RemarkWarning, certificate, certify, dependency
from jaxformer.verify.certificate import check_property
from jaxformer.verify.certified_model import certified_model
from tests.properties import tiny
from tests.slow import mostly_rare, mostly_slow


class Leaky(jf.Decoder):
    """A decoder that reads the next token under the condition `when`."""

    when: str = "always"

    def forward(self, weights, inputs, cache=None, **options):
        passed = super().forward(weights, inputs, cache, **options)
        hidden = passed.hidden
        leaks = {
            "always": True,
            "batch": hidden.shape[0] > 32,
            "length": hidden.shape[1] > 12,
            "bfloat16": self.config.dtype == "bfloat16",
        }
        if not leaks[self.when] or cache is not None:
            return passed
        return passed._replace(hidden=hidden + jnp.roll(hidden, -1, axis=1))


@pytest.fixture(autouse=True)
def without_blocks(monkeypatch):
    monkeypatch.setattr(certificate, "first_failing_layer", lambda subject: None)


MODEL = tiny.build(num_layers=1)
SCOPES = {
    "batch": {"length": 12, "batch_size": 33},
    "length": {"length": 13},
    "bfloat16": {"length": 12, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("when", mostly_slow(SCOPES))
def test_model_verification_finds_leak_at_given_length_and_batch_size_and_dtype(when, monkeypatch):
    monkeypatch.setattr(dependency, "WITNESSES", ("taint",))
    model, variables = Leaky(MODEL.config, MODEL.execution, when=when), tiny.weights(MODEL, 0)
    assert check_property(certified_model(model, variables, length=12), "causal").holds
    found = check_property(certified_model(model, variables, **SCOPES[when]), "causal")
    assert not found.holds and "unexpected" in found.detail
    assert ("; in bfloat16" in found.detail) == (when == "bfloat16")
    if when == "batch":
        alone = check_property(
            certified_model(model, variables, **SCOPES[when]), "batch-independent"
        )
        assert not alone.holds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_rare(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize(
    "kind",
    mostly_rare([jf.DecoderConfig, jf.RecurrentConfig, jf.EncoderConfig], jf.RecurrentConfig),
)
def test_correct_model_passes_verification_in_float32_and_bfloat16(kind, dtype):
    model = tiny.build(kind=kind)
    options = {"length": 12, "batch_size": 5, "dtype": dtype}
    found = list(certify(model, tiny.weights(model, 0), **options))
    assert all(entry.holds for entry in found), found
    assert any("batch element 2 of 5" in entry.detail for entry in found)


@pytest.mark.slow
def test_certify_uses_other_methods_if_taint_analysis_lacks_a_primitive(monkeypatch):
    """`certify` warns about it, unless remarks are allowed. A fused GPU kernel is such a case."""
    from jaxformer.verify import taint

    found_by_rule = taint.marks_of_outputs
    monkeypatch.setattr(
        taint,
        "marks_of_outputs",
        lambda x: found_by_rule(x) if x.primitive.name != "dot_general" else None,
    )
    monkeypatch.setattr(certificate, "PROPERTIES", {"causal": certificate.PROPERTIES["causal"]})
    variables = tiny.weights(MODEL, 0)
    with pytest.warns(RemarkWarning, match="taint"):
        (found,) = certify(MODEL, variables, length=12)
    assert found.holds and "checked by derivatives and perturbation" in found.detail
    assert "no rule for dot_general" in found.detail
    list(certify(MODEL, variables, length=12, allow_remarks=True))


REFUSED = {
    "batch_size is 0; it must be a whole number of at least 1": {"batch_size": 0},
    "batch_size is 2.5": {"batch_size": 2.5},
    "dtype is 'float16'; it must be one of float32, bfloat16": {"dtype": "float16"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_model_verification_rejects_invalid_batch_size_and_dtype(message):
    with pytest.raises(ValueError, match=message):
        certified_model(MODEL, {"params": {}}, **REFUSED[message])


def test_verify_command_applies_given_length_and_batch_size_and_dtype(
    tmp_path, capsys, monkeypatch
):
    from jaxformer.cli import main

    monkeypatch.setattr(certificate, "PROPERTIES", {"deterministic": certificate._deterministic})
    monkeypatch.setattr("jaxformer.verify.comparison.draw_dependency", lambda *_: None)
    monkeypatch.setattr(
        "jaxformer.verify.certified_model.CertifiedModel.dependency",
        property(lambda self: None),
        raising=False,
    )
    folder = tmp_path / "model"
    jf.save(folder, MODEL, tiny.weights(MODEL, 0))
    words = ["verify", str(folder), "--json", "--length", "13", "--batch-size", "3"]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["length"], said["batch_size"], said["dtype"]) == (13, 3, "bfloat16")
    assert "in bfloat16" in said["properties"][0]["detail"]
    assert main([*words[:3], "--batch-size", "0"]) == 2
    assert "batch_size is 0" in capsys.readouterr().err
