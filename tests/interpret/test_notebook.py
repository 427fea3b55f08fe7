"""What a notebook shows of models, configs and captured values, through treescope."""

import jax
import pytest

import jaxformer as jf
from tests.properties import tiny
from tests.slow import mostly_slow

treescope = pytest.importorskip("treescope", reason="treescope is not installed")


@pytest.mark.parametrize(
    "kind",
    mostly_slow([jf.DecoderConfig, jf.RecurrentConfig, jf.EncoderDecoderConfig], jf.DecoderConfig),
)
def test_treescope_shows_models_and_captured_values_as_trees(kind):
    model = tiny.build(kind)
    shown = treescope.render_to_text(model)
    assert shown.startswith(f"{type(model).__name__}(")
    for part in (f"config={kind.__name__}(", "vocab_size=13", "execution=Execution("):
        assert part in shown
    variables, point = tiny.weights(model, 0), model.layer_hook_points[-1]
    tokens = tiny.tokens(0, 1, 12)
    source = tokens if model.config.reads_source else None
    captured = jf.inspect(model, variables, tokens, source=source, capture=(point,)).captured
    shape = ", ".join(map(str, captured[point].shape))
    assert f"{point!r}: <jax.Array float32({shape})" in treescope.render_to_text(captured)
    assert "<script" in treescope.render_to_html(jax.tree.map(lambda x: x, variables))
