"""Comparison of an imported model with the same checkpoint in transformers."""

import math
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.artifacts.files import read_json
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.functional.losses.cross_entropy import token_losses
from jaxformer.models.config import EncoderConfig, ModelConfig
from jaxformer.models.config.generation import Constraints
from jaxformer.models.language_model import LanguageModel, Variables

PEERS = ("torch", "transformers")
TEXT = (
    "It was a bright cold day in the village, and the clocks had stopped. Nobody knew why the tide "
    "came in twice that morning; the harbour master wrote it down, closed his book and went home."
)


class Parity(NamedTuple):
    """Differences between an imported model and the model in transformers.

    Attributes:
        largest: The largest absolute difference of the logits.
        mean: The mean absolute difference of the logits.
        perplexities: (perplexity in transformers, perplexity in jaxformer); None for an encoder.
        same_tokens: The number of tokens before the first difference between the models' greedily
            generated texts.
        tokens: The number of generated tokens.
    """

    largest: float
    mean: float
    perplexities: tuple[float, float] | None
    same_tokens: int
    tokens: int


def missing_peers() -> str | None:
    """Returns the names of required packages that are not installed; None if all are installed."""
    missing = []
    for name in PEERS:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    return " and ".join(missing) or None


def parity(
    folder: Path,
    architecture: str,
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer | None,
    max_new_tokens: int = 16,
) -> Parity:
    """Compares an imported model with transformers in float32.

    The input of both models is a fixed English text. If `tokenizer` is None, the input is a
    sequence of random token ids.

    Args:
        folder: The checkpoint in Hugging Face format.
        architecture: The name of the checkpoint's class in transformers.
        model: The imported model.
        variables: The parameters of the imported model.
        tokenizer: The checkpoint's tokenizer, or None.
        max_new_tokens: The number of tokens that greedy decoding generates.

    Raises:
        ValueError: The installed version of transformers does not have this class.
    """
    torch, transformers = map(import_module, PEERS)
    if not hasattr(transformers, architecture):
        raise ValueError(
            f"transformers {transformers.__version__} does not have the class {architecture}"
        )
    packed = {}
    # MXFP4 is the only quantization that the import accepts.
    if read_json(folder / "config.json").get("quantization_config"):
        packed["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    theirs = getattr(transformers, architecture).from_pretrained(
        folder,
        dtype=torch.float32,
        # Without this option, config.json could select an attention kernel with code from the hub.
        attn_implementation="eager",
        use_safetensors=True,
        trust_remote_code=False,
        **packed,
    )
    theirs.eval()
    ids, read = _ids(model, tokenizer), {}
    inputs = {"input_ids": torch.tensor(ids[None])}
    if model.config.reads_source:
        inputs["decoder_input_ids"], read = inputs["input_ids"], {"source": ids[None]}
    with torch.no_grad():
        outputs = theirs(**inputs)
    name, method = _output(model.config, outputs)
    logits = outputs[name].numpy()
    ours = jax.jit(partial(model.apply, method=method))(variables, ids[None], **read)
    apart = np.abs(np.asarray(ours) - logits)
    differences = float(apart.max()), float(apart.mean())
    if model.config.bidirectional:
        return Parity(*differences, None, 0, 0)
    perplexities = _perplexity(jnp.asarray(logits), ids), _perplexity(ours, ids)
    start = ids[:1] if read else ids
    options: dict[str, Any] = {"source": [ids.tolist()] if read else None}
    # `Constraints()` applies no constraints.
    options |= {"sampler": Sampler(temperature=0.0), "constraints": Constraints()}
    prompts = [start.tolist()]
    (tokens,) = generate(model, variables, prompts, max_new_tokens=max_new_tokens, **options).tokens
    # `same` counts the predictions before the first difference. After this difference, transformers
    # would have continued another text, so later predictions are not comparable.
    text = torch.tensor(np.concatenate([start, tokens])[None])
    inputs["decoder_input_ids" if read else "input_ids"] = text
    with torch.no_grad():
        predicted = theirs(**inputs).logits[0, len(start) - 1 : -1].argmax(-1)
    same = int(np.cumprod(tokens == predicted.numpy()).sum())
    return Parity(*differences, perplexities, same, max_new_tokens)


def _output(config: ModelConfig, outputs: Any) -> tuple[str, str | None]:
    """Returns (name of the output in transformers, jaxformer's method with the same output)."""
    if isinstance(config, EncoderConfig) and config.num_labels and not config.transform:
        return "logits", "classify"
    for name in ("prediction_logits", "logits"):
        if name in outputs:
            return name, None
    # Encoders without an output head return their hidden states.
    return "last_hidden_state", "encode"


def _ids(model: LanguageModel, tokenizer: Tokenizer | None) -> Int[np.ndarray, " length"]:
    if tokenizer is None:
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 64)
    else:
        ids = np.array(tokenizer.encode_source(TEXT))
    return ids[: max(1, model.config.max_length - 32)]


def _perplexity(logits: Float[Array, "1 length vocab"], ids: Int[np.ndarray, " length"]) -> float:
    return math.exp(float(token_losses(logits[0, :-1], jnp.asarray(ids[1:])).mean()))
