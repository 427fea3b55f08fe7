"""jaxformer: Transformer models for JAX and Flax, written as pure functions.

    import jaxformer as jf

    model     = jf.Decoder(jf.preset("gpt2-124m"))
    variables = model.init(key, tokens)
    logits    = jax.jit(model.apply)(variables, tokens)
    out       = jf.generate(model, variables, prompts, max_new_tokens=64, key=key)

`jf.functional` contains the mathematics. Other subpackages are attributes, too (`jf.verify`, …).
`__init__.pyi` lists the public names, also for editors and type checkers. The names are imported on
first use, so `import jaxformer` and `jaxformer --help` do not load JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"
