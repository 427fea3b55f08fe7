"""Saving rejects a model with parts that its files cannot store."""

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
# Masks that jaxformer's own format can store, and a mask that it cannot store.
MASKS = {
    "mask is All(": Causal() & EveryThird(),
    "mask is Window": Window(3),
    "mask is DenseMask": DenseMask(np.tri(4, dtype=bool)),
}
LOST = {
    "model is an OwnDecoder": OwnDecoder(CONFIG),
    "execution is an OwnExecution": jf.Decoder(CONFIG, execution=OwnExecution()),
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
def test_saving_a_model_that_cannot_be_stored_leaves_no_file_behind(name, tmp_path):
    """Every writer rejects the model and leaves no file behind."""
    for path, write in writers(tmp_path):
        assert error_of(write, path, LOST[name], {"params": {}}, tokenizer()).startswith(name)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", MASKED)
def test_export_rejects_user_defined_mask(kind, name, tmp_path):
    """jaxformer's own format rejects only masks with arrays."""
    own = tiny.build(kind).copy(mask=MASKS[name])
    for path, write in writers(tmp_path):
        if path.name != "saved" or name == "mask is DenseMask":
            said = error_of(write, path, own, {"params": {}}, tokenizer())
            assert said.startswith(name if path.name != "saved" else "mask.array is array(")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "config, mask",
    [
        (CONFIG, None),
        (CONFIG, Causal()),
        (replace(CONFIG, prefix=2), None),
        (replace(CONFIG, dtype="bfloat16"), None),
    ],
)
def test_save_accepts_explicit_mask_equal_to_that_of_the_config(config, mask, tmp_path):
    """The loaded model has the same mask."""
    model = jf.Decoder(config, mask=mask, execution=jf.Execution(layers="scan"))
    jf.save(tmp_path / "saved", model, tiny.weights(model, 0))
    assert jf.load(tmp_path / "saved").model.masks == model.masks


def test_save_rejects_model_whose_methods_or_functions_are_replaced(tmp_path, monkeypatch):
    """Replaced methods of the class and replaced pure functions are rejected."""
    model = jf.Decoder(CONFIG)
    with monkeypatch.context() as patched:
        patched.setattr(jf.Decoder, "logits", lambda *x: x, raising=False)
        assert error_of(jf.save, tmp_path / "a", model, {}).startswith("logits is a function")
    with monkeypatch.context() as patched:
        patched.setattr(jf.Decoder, "builder", staticmethod(lambda config, mask: None))
        assert error_of(jf.save, tmp_path / "a", model, {}).startswith("builder is a function")


@pytest.mark.parametrize("kind", KINDS.values())
def test_save_accepts_bound_and_unbound_library_models(kind):
    """Bound and unbound modules with the library's functions are accepted."""
    from jaxformer.artifacts.saved import check_restorable

    model = tiny.build(kind)
    check_restorable(model)
    check_restorable(model.bind({"params": {}}))
