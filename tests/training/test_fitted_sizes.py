"""The remaining sizes of a model follow from the user's sizes, and the screen shows all sizes."""

from dataclasses import fields, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxformer.models.config import KINDS, architecture_name
from jaxformer.models.sizes import describe_sizes
from jaxformer.training.fitting import fit_preset
from tests.training.test_fitting import EVERY

WIDTHS = ("embed_dim", "num_heads", "num_kv_heads", "mlp_dim", "hidden_dim")
TRANSFORMERS = [name for name, run in EVERY.items() if hasattr(run.model, "num_heads")]


def sizes(model):
    resolved = model.resolved
    return {name: getattr(resolved, name) for name in WIDTHS if hasattr(resolved, name)}


def head_width(model):
    return model.resolved.head_dim


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("factor", [2, 3, 5])
def test_multiplying_embed_dim_of_a_preset_multiplies_all_widths(name, factor):
    run = EVERY[name]
    fitted = fit_preset(run, {"embed_dim": factor * run.model.embed_dim}).model
    assert sizes(fitted) == {field: factor * x for field, x in sizes(run.model).items()}
    untouched = [x.name for x in fields(fitted) if x.name not in WIDTHS]
    assert all(getattr(fitted, x) == getattr(run.model, x) for x in untouched)


@pytest.mark.parametrize("name", TRANSFORMERS)
@settings(phases=[Phase.explicit, Phase.generate], max_examples=30)
@given(width=st.integers(1, 3000))
def test_preset_adapted_to_embed_dim_keeps_proportions_and_head_width(name, width):
    """num_heads × head_dim is close to embed_dim, and head_dim is close to the preset's
    head_dim."""
    model = EVERY[name].model
    fitted = fit_preset(EVERY[name], {"embed_dim": width}).model.resolved
    usual = min(head_width(model), width)
    assert usual / 2 <= fitted.head_dim <= 2 * usual + 1
    total = fitted.num_heads * fitted.head_dim
    assert total == width or abs(total - width) <= usual / 2 + 1
    assert fitted.num_heads % fitted.num_kv_heads == 0
    ratio = model.resolved.mlp_dim / model.embed_dim
    assert abs(fitted.mlp_dim - width * ratio) <= 0.5


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"embed_dim": 384}, {"num_heads": 6, "mlp_dim": 1032, "head_dim": 64}),
        ({"embed_dim": 385}, {"num_heads": 6, "mlp_dim": 1035, "head_dim": 64}),
        ({"head_dim": 32}, {"embed_dim": 128, "num_heads": 4, "mlp_dim": 344}),
        ({"head_dim": 32, "num_heads": 8}, {"embed_dim": 256, "mlp_dim": 688}),
        ({"num_heads": 4}, {"embed_dim": 128, "head_dim": 32, "mlp_dim": 344}),
        ({"embed_dim": 256, "mlp_dim": 344}, {"num_heads": 4, "mlp_dim": 344}),
        ({"embed_dim": 256, "num_heads": 2}, {"head_dim": 128, "mlp_dim": 688}),
    ],
)
def test_fit_preset_derives_missing_model_sizes_from_the_given_sizes(given, sizes):
    fitted = fit_preset(EVERY["stdlib decoder"], given).model.resolved
    found = {name: getattr(fitted, name) for name in {**sizes, **given}}
    assert found == {**sizes, **given}


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [None, 48])
def test_preset_adapted_to_another_width_keeps_head_width_and_query_group_size(group, head_dim):
    """This includes a preset with num_heads × head_dim larger than embed_dim."""
    run = EVERY["stdlib decoder"]
    model = replace(run.model, num_heads=4, num_kv_heads=4 // group, head_dim=head_dim)
    fitted = fit_preset(replace(run, model=model), {"embed_dim": 256}).model
    assert (fitted.num_heads, fitted.num_kv_heads) == (8, 8 // group)
    assert head_width(fitted) == head_width(model)


@pytest.mark.parametrize(
    ("given", "tied"), [({"hidden_dim": 96}, True), ({"hidden_dim": 96, "embed_dim": 64}, False)]
)
def test_recurrent_embeddings_stay_tied_if_only_hidden_dim_is_set(given, tied):
    fitted = fit_preset(EVERY["stdlib recurrent"], given).model
    assert (fitted.tie_embeddings, fitted.hidden_dim) == (tied, 96)
    assert fitted.embed_dim == given.get("embed_dim", 96)


@pytest.mark.parametrize("kind", KINDS)
def test_printed_model_description_contains_every_size(kind):
    """Each size gets a different number, so that the description cannot confuse two sizes."""
    model = next(run.model for run in EVERY.values() if architecture_name(run.model) == kind)
    named = ("num_layers", "mlp_dim", "vocab_size", "max_length", "num_encoder_layers")
    named += ("encoder_mlp_dim", "kernel_size", "hidden_dim")
    values = {x: 101 + i for i, x in enumerate(named) if hasattr(model, x)}
    values |= {"embed_dim": 84, "share_embeddings": False, "tie_embeddings": False}
    if hasattr(model, "num_heads"):
        values |= {"num_heads": 6, "num_kv_heads": 2}
    model = replace(model, **{x: y for x, y in values.items() if hasattr(model, x)})
    text = "\n".join(describe_sizes(model))
    shown = {word.strip(",:") for word in text.split()}
    assert text.startswith(f"model: {kind}")
    expected = [getattr(model, x) for x in values if hasattr(model, x)]
    assert {str(x) for x in expected if type(x) is int} <= shown
