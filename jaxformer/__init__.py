"""jaxformer: Transformer models for JAX and Flax, written as pure functions.

    import jaxformer as jf

    model     = jf.Decoder(jf.preset("gpt2-124m"))
    variables = model.init(key, tokens)
    logits    = jax.jit(model.apply)(variables, tokens)
    out       = jf.generate(model, variables, prompts, max_new_tokens=64, key=key)

The mathematics is in `jf.functional`. The other subpackages are attributes too (`jf.verify`, …).
Names and subpackages are imported on first use, so `import jaxformer` and `jaxformer --help` do not
load JAX.
"""

from importlib import import_module

_HOME = {
    "Constraints": "models.config.generation",
    "Convolutional": "models.kinds",
    "ConvolutionalConfig": "models.config",
    "Decoder": "models.kinds",
    "DecoderConfig": "models.config",
    "Encoder": "models.kinds",
    "EncoderConfig": "models.config",
    "EncoderDecoder": "models.kinds",
    "EncoderDecoderConfig": "models.config",
    "Execution": "models.config",
    "GenerationDefaults": "models.config.generation",
    "Generation": "decoding.generate",
    "Hypotheses": "decoding.beam",
    "Patch": "functional.taps",
    "Recurrent": "models.kinds",
    "RecurrentConfig": "models.config",
    "RecurrentEncoderDecoder": "models.kinds",
    "RecurrentEncoderDecoderConfig": "models.config",
    "RotaryScaling": "models.config",
    "Sampler": "decoding.sampling",
    "advance": "decoding.autoregressive",
    "beam_search": "decoding.beam",
    "build": "models.kinds",
    "generate": "decoding.generate",
    "inspect": "decoding.autoregressive",
    "export": "hub.export",
    "keep_freed_memory": "runtime",
    "load": "hub.load",
    "merge_adapter": "models.lora",
    "parameter_count": "models.parameters",
    "prepare": "decoding.prepared",
    "preset": "models.config",
    "save": "artifacts.saved",
    "score": "decoding.score",
    "start": "decoding.autoregressive",
}
_ROOMS = ("artifacts", "bench", "decoding", "doctor", "functional", "hub", "interpret", "models")
_ROOMS += ("training", "verify")
__all__ = sorted((*_HOME, *_ROOMS))
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _ROOMS:
        return import_module(f"jaxformer.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"jaxformer.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
