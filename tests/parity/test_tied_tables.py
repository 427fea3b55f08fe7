"""A checkpoint with tied embeddings may store its table under any of its names."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
pytest.importorskip("transformers", reason="parity needs transformers")
from safetensors.numpy import load_file, save_file  # noqa: E402

import jaxformer as jf  # noqa: E402
from tests.errors import error_of  # noqa: E402
from tests.parity import checkpoints  # noqa: E402
from tests.slow import mostly_slow  # noqa: E402


def names_of_the_table(theirs) -> list[str]:
    """Returns all names of the input embeddings' parameter: one if the head is not tied."""
    table = theirs.get_input_embeddings().weight
    every = theirs.named_parameters(remove_duplicate=False)
    return [name for name, parameter in every if parameter is table]


def has_table_in_head(theirs) -> bool:
    return theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight


def first_tied(family, folder):
    """Saves the family's first checkpoint with tied embeddings. Returns (model, its folder)."""
    for case in range(3):
        theirs, base = checkpoints.saved(family, case, folder / str(case))
        if has_table_in_head(theirs):
            return theirs, base
    raise AssertionError(f"no checkpoint of {family} ties its head")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", mostly_slow(checkpoints.FAMILIES, "t5", "mt5", "bert"))
def test_tied_embedding_table_is_loaded_under_any_of_its_tensor_names(family, tmp_path):
    """transformers reads the same table, and ties the head to it."""
    theirs, base = first_tied(family, tmp_path)
    expected = jf.load(base)
    tensors, names = load_file(base / "model.safetensors"), names_of_the_table(theirs)
    assert len(names) > 1
    (table,) = (tensors.pop(name) for name in names if name in tensors)
    for name in names:
        save_file(tensors | {name: table}, base / "model.safetensors", metadata={"format": "pt"})
        again = type(theirs).from_pretrained(base)
        np.testing.assert_array_equal(again.get_input_embeddings().weight.detach().numpy(), table)
        assert has_table_in_head(again)
        found = jf.load(base)
        assert found.model.config == expected.model.config
        embedding = found.variables["params"]["embedding"]["tokens"]
        np.testing.assert_array_equal(embedding, table, err_msg=name)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_checkpoint_with_untied_head_but_no_embedding_table_is_rejected(family, tmp_path):
    """transformers leaves the table random in this case."""
    theirs, base = first_tied(family, tmp_path)
    theirs.config.tie_word_embeddings = False
    theirs.config.save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("shared.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert "tensor shared.weight is missing" in error_of(jf.load, base)
