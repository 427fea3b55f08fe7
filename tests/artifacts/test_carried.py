"""Saving refuses a model that has anything its files cannot hold."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.functional import Causal, Mask, Window
from jaxformer.functional.attention.masks import DenseMask
from jaxformer.hub.gguf import export_gguf
from jaxformer.models.config import KINDS
from tests.errors import error_of
from tests.hub.foreign import tokenizer
from tests.properties import tiny

MASKED = (jf.DecoderConfig, jf.EncoderConfig, jf.EncoderDecoderConfig)


@jax.tree_util.register_static
@dataclass(frozen=True)
class EveryThird(Mask):
    """Lets a query attend to every third key."""

    def __call__(self, query, key):
        return (query.position_ids()[..., :, None] - key.position_ids()[..., None, :]) % 3 == 0


@dataclass(frozen=True)
class OwnExecution(jf.Execution):
    """An execution that a user defined."""


class OwnDecoder(jf.Decoder):
    """A decoder with an overridden method."""

    def logits(self, weights, hidden):
        return 2 * super().logits(weights, hidden)


def with_own_function(model):
    object.__setattr__(model, "logits", lambda weights, hidden: hidden)
    return model


CONFIG = tiny.build().config
LOST = {
    "mask is All(": jf.Decoder(CONFIG, mask=Causal() & EveryThird()),
    "mask is Window": jf.Decoder(CONFIG, mask=Window(3)),
    "mask is DenseMask": jf.Decoder(CONFIG, mask=DenseMask(np.tri(4, dtype=bool))),
    "model is a OwnDecoder": OwnDecoder(CONFIG),
    "execution is a OwnExecution": jf.Decoder(CONFIG, execution=OwnExecution()),
    "logits is a function": with_own_function(jf.Decoder(CONFIG)),
    "model is a dict": {},
}


def writers(folder):
    """Yields the path and the function of each format."""
    yield folder / "saved", jf.save
    yield folder / "exported", jf.export
    if pytest.importorskip("gguf", reason="gguf is not installed"):
        yield folder / "model.gguf", export_gguf


@pytest.mark.parametrize("name", LOST)
def test_a_model_that_no_file_can_hold_is_refused_by_name(name, tmp_path):
    """Every writer refuses it and leaves no file behind."""
    for path, write in writers(tmp_path):
        assert error_of(write, path, LOST[name], {"params": {}}, tokenizer()).startswith(name)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", MASKED)
def test_a_mask_of_any_kind_of_model_is_refused(kind, tmp_path):
    model = tiny.build(kind)
    own = model.copy(mask=EveryThird())
    assert "mask is EveryThird()" in error_of(jf.save, tmp_path / "saved", own, {})


@pytest.mark.parametrize(
    "config, mask",
    [
        (CONFIG, None),
        (CONFIG, Causal()),
        (replace(CONFIG, prefix=2), None),
        (replace(CONFIG, dtype="bfloat16"), None),
    ],
)
def test_a_mask_that_equals_the_config_s_is_accepted(config, mask, tmp_path):
    """The loaded model has the same rule."""
    model = jf.Decoder(config, mask=mask, execution=jf.Execution(layers="scan"))
    jf.save(tmp_path / "saved", model, tiny.weights(model, 0))
    assert jf.load(tmp_path / "saved").model.masks == model.masks


def test_a_replaced_function_is_refused(tmp_path, monkeypatch):
    """Both in the class and among the pure functions that it calls."""
    model = jf.Decoder(CONFIG)
    with monkeypatch.context() as patched:
        patched.setattr(jf.Decoder, "logits", lambda *x: x, raising=False)
        assert error_of(jf.save, tmp_path / "a", model, {}).startswith("logits is a function")
    with monkeypatch.context() as patched:
        patched.setattr(jf.Decoder, "builder", staticmethod(lambda config, mask: None))
        assert error_of(jf.save, tmp_path / "a", model, {}).startswith("builder is a function")


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_plain_model_is_accepted(kind):
    """Its functions are the library's, whether the module is bound or not."""
    from jaxformer.artifacts.saved import check_restorable

    model = tiny.build(kind)
    check_restorable(model)
    check_restorable(model.bind({"params": {}}))
