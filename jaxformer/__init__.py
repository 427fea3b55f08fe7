"""jaxformer: the Transformer, whole, as pure functions in JAX and Flax.

    import jaxformer as jf

    model     = jf.Decoder(jf.preset("gpt2-124m"))
    variables = model.init(key, tokens)
    logits    = jax.jit(model.apply)(variables, tokens)
    out       = jf.generate(model, variables, prompts, max_new_tokens=64, key=key)

The mathematics is in `jaxformer.functional`. Names are imported when first used, so that importing
the package, or asking the command line for help, does not wait for JAX.
"""

from importlib import import_module

_HOME = {
    "Convolutional": "models.convolutional",
    "ConvolutionalConfig": "models.config",
    "Decoder": "models.decoder",
    "DecoderConfig": "models.config",
    "Encoder": "models.encoder",
    "EncoderConfig": "models.config",
    "EncoderDecoder": "models.encoder_decoder",
    "EncoderDecoderConfig": "models.config",
    "Execution": "models.config",
    "Generation": "decoding.generate",
    "Hypotheses": "decoding.beam",
    "Patch": "functional.taps",
    "Recurrent": "models.recurrent",
    "RecurrentConfig": "models.config",
    "RecurrentEncoderDecoder": "models.encoder_decoder",
    "RecurrentEncoderDecoderConfig": "models.config",
    "RotaryScaling": "models.config",
    "Sampler": "decoding.sampling",
    "advance": "decoding.autoregressive",
    "beam_search": "decoding.beam",
    "build": "models.build",
    "generate": "decoding.generate",
    "inspect": "decoding.autoregressive",
    "export": "hub.export",
    "keep_freed_memory": "runtime",
    "load": "hub.load",
    "parameter_count": "models.build",
    "prepare": "decoding.prepared",
    "preset": "models.config",
    "save": "artifacts.saved",
    "score": "decoding.score",
    "start": "decoding.autoregressive",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"jaxformer.{_HOME[name]}"), name)
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
