"""A model beside the one of transformers that it was read from: how far apart the two are."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.functional.losses import token_losses
from jaxformer.models.config import EncoderConfig
from jaxformer.models.config.encoder_decoder import ReadsSource

TEXT = (
    "It was a bright cold day in the village, and the clocks had stopped. Nobody knew why the tide "
    "came in twice that morning; the harbour master wrote it down, closed his book and went home."
)


class Parity(NamedTuple):
    """largest, mean: difference of the logits; perplexities: of theirs and ours, None of an
    encoder; same_tokens, tokens: how many of greedy decoding's first tokens agree."""

    largest: float
    mean: float
    perplexities: tuple[float, float] | None
    same_tokens: int
    tokens: int


def missing_peers() -> str | None:
    """What must be installed for a comparison and is not; None: nothing."""
    missing = []
    for name in ("torch", "transformers"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    return " and ".join(missing) or None


def parity(folder: Path, architecture: str, model, variables, tokenizer, max_new_tokens=16):
    """Both models in float32 on one text (without a tokenizer: on random ids).

    ValueError if transformers has no such class, as is so of names that it has dropped.
    """
    import torch
    import transformers

    if not hasattr(transformers, architecture):
        raise ValueError(f"transformers {transformers.__version__} has no {architecture}")
    theirs = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    ids = _ids(model, tokenizer)
    inputs = {"input_ids": torch.tensor(ids[None])}
    read = {}
    if isinstance(model.config, ReadsSource):
        inputs["decoder_input_ids"], read = inputs["input_ids"], {"source": ids[None]}
    with torch.no_grad():
        outputs = theirs(**inputs)
    name, method = _output(model.config, outputs)
    logits = outputs[name].numpy()
    ours = jax.jit(partial(model.apply, method=method))(variables, ids[None], **read)
    apart = np.abs(np.asarray(ours) - logits)
    if isinstance(model.config, EncoderConfig):
        return Parity(float(apart.max()), float(apart.mean()), None, 0, 0)
    both = tuple(_perplexity(jnp.asarray(x), ids) for x in (logits, ours))
    start = ids[:1] if read else ids
    expected = _greedy(theirs, torch, inputs, start, max_new_tokens, bool(read))
    found = generate(
        model,
        variables,
        [start.tolist()],
        max_new_tokens=max_new_tokens,
        sampler=Sampler(temperature=0.0),
        source=[ids.tolist()] if read else None,
    ).tokens[0]
    same = int((np.cumprod(np.asarray(found) == expected)).sum())
    return Parity(float(apart.max()), float(apart.mean()), both, same, max_new_tokens)


def _output(config, outputs) -> tuple[str, str | None]:
    """(what theirs gives, our method that gives the same)."""
    if isinstance(config, EncoderConfig) and config.num_labels and not config.transform:
        return "logits", "classify"
    for name in ("prediction_logits", "logits"):
        if name in outputs:
            return name, None
    return "last_hidden_state", "encode"  # of a bare encoder


def _ids(model, tokenizer) -> np.ndarray:
    longest = model.config.max_length - 32
    if tokenizer is None:
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 64)
    else:
        ids = np.array(tokenizer.encode_source(TEXT))
    return ids[: max(1, longest)]


def _perplexity(logits, ids) -> float:
    return math.exp(float(token_losses(logits[0, :-1], jnp.asarray(ids[1:])).mean()))


def _greedy(theirs, torch, inputs, start, max_new_tokens: int, reads_source: bool) -> np.ndarray:
    """The most probable tokens one by one, by whole passes."""
    ids = torch.tensor(start[None])
    for _ in range(max_new_tokens):
        name = "decoder_input_ids" if reads_source else "input_ids"
        with torch.no_grad():
            logits = theirs(**{**inputs, name: ids}).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(start) :].numpy()
