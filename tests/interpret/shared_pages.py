"""Pages that several test modules read. Each test process makes a page only once."""

from functools import cache

import jax

import jaxformer as jf
from jaxformer.interpret import explain
from jaxformer.models.parameters import init
from jaxformer.training.presets import training_preset
from tests.interpret.chromium import without_slow_data
from tests.interpret.pages import OPTIONS, TEXT, model_of, tokenizer

# Architectures without a page in OPTIONS. Their pages show small models of the presets.
ARCHITECTURES = (
    "encoder",
    "encoder-decoder",
    "recurrent",
    "convolutional",
    "recurrent-encoder-decoder",
)
EXPERTS = {"num_experts": 2, "layer_types": ("attention", "short_convolution")}


@cache
def page_of(kind):
    """Returns a model, its variables and its page.

    `kind` is an architecture, a decoder of OPTIONS or "experts", a decoder with captured values.
    """
    with without_slow_data():
        if kind in OPTIONS or kind == "experts":
            model, variables = model_of(**OPTIONS.get(kind, EXPERTS))
            return model, variables, explain(model, variables, TEXT, tokenizer())
        model = jf.build(training_preset("tiny", kind).model)
        variables = init(model, jax.random.key(0))
        target = {"target": [1, 2, 3]} if model.config.reads_source else {}
        return model, variables, explain(model, variables, [3, 4, 5, 6], **target)
