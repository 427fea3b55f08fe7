"""Random configs, exported or edited, give equal logits in jaxformer and transformers.

Unsupported options are rejected. HYPOTHESIS_PROFILE=thorough tests more configs.
"""

import json
import os
import random
import shutil

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
from huggingface_hub.errors import StrictDataclassFieldValidationError  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.hub.families import FAMILIES  # noqa: E402
from jaxformer.models.config import EncoderConfig  # noqa: E402
from jaxformer.models.config.encoder import ReadsSource  # noqa: E402
from tests.hub.configs import base, edited, families_of, near  # noqa: E402
from tests.properties import tiny  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
pytestmark += [pytest.mark.filterwarnings("ignore")]  # transformers warns of ignored options
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXPORTS, EDITED = (40, 60) if THOROUGH else (2, 2)
LENGTH = 40


def assert_same(folder, architecture: str, model, variables) -> None:
    """Asserts that transformers opens the folder, misses no tensor, and gives equal logits."""
    cls = getattr(transformers, architecture)
    theirs, loading = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    theirs.config.use_cache = False  # Qwen3-Next's cache needs a layer with attention
    config = model.config
    reads = isinstance(config, ReadsSource)
    # Some classes treat ids below 4 as padding.
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 40, (1, min(LENGTH, config.max_length)))
    source = rng.integers(4, 40, (1, 20))
    given = {"input_ids": torch.tensor(source if reads else tokens)}
    given |= {"decoder_input_ids": torch.tensor(tokens)} if reads else {}
    with torch.no_grad():
        outputs = theirs.eval()(**given)
    name = next(x for x in ("prediction_logits", "logits", "last_hidden_state") if x in outputs)
    method = None
    if isinstance(config, EncoderConfig) and config.num_labels and not config.transform:
        method = "classify"
    elif name == "last_hidden_state":
        method = "encode" if isinstance(config, EncoderConfig) else "hidden_states"
    read = {"source": source} if reads else {}
    ours = jax.jit(lambda variables: model.apply(variables, tokens, method=method, **read))
    expected = outputs[name].numpy()
    size = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(ours(variables), expected, rtol=0, atol=1e-4 * size)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_random_config_has_equal_logits_in_transformers(family, tmp_path):
    """In every family that accepts the config, transformers gives jaxformer's logits."""
    draw, opened = random.Random(family), 0
    for _ in range(100 * EXPORTS):
        config = near(family, draw)
        for name in [family] if opened else families_of(config):
            try:
                FAMILIES[name].to_options(config)
            except ValueError:
                continue
            model = jf.build(config)
            variables = tiny.weights(model, 0)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            cls = jf.export(tmp_path / "out", model, variables, model_type=name)
            try:
                assert_same(tmp_path / "out", cls, model, variables)
            except Exception as error:
                error.add_note(f"exported as {name}: {config}")
                raise
            opened += 1
        if opened >= EXPORTS:
            return
    raise AssertionError("nearly all configs were refused")


@pytest.mark.parametrize("family", FAMILIES)
def test_changed_config_json_options_raise_error_or_give_equal_logits(family, tmp_path):
    """A config with one to three changed options is rejected or gives equal logits."""
    draw, opened = random.Random(family), 0
    model = jf.build(base(family))
    variables = tiny.weights(model, 0)
    cls = jf.export(tmp_path / "out", model, variables, model_type=family)
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text())
    for _ in range(100 * EDITED):
        options = edited(content, draw)
        if options == content:
            continue
        path.write_text(json.dumps(options))
        try:
            found = jf.load(tmp_path / "out")
        except ValueError:
            continue
        try:
            assert_same(tmp_path / "out", cls, found.model, found.variables)
        except StrictDataclassFieldValidationError:
            continue  # null: some classes refuse it, others take it as the default
        except Exception as error:
            changed = {x: y for x, y in options.items() if content.get(x, "missing") != y}
            error.add_note(f"{family}: {changed}, without {content.keys() - options.keys()}")
            raise
        opened += 1
        if opened >= EDITED:
            return
