"""Data of the tab that compares two models on one text.

All values are computed by JAX and NumPy. For position i, let p and q be the two models'
distributions of the next token. The page shows their largest probabilities, the loss
−log p(next token) in nats, and the Jensen–Shannon divergence
(KL(p ‖ m) + KL(q ‖ m)) / 2 with m = (p + q) / 2, in bits, which lies in 0 … 1.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxformer.artifacts.saved import Checkpoint
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.linear.affine import dense_all
from jaxformer.interpret.encoded_text import EncodedText, check_tokens, token_names
from jaxformer.interpret.page_data import NUM_SHOWN, attention_data, run_captured
from jaxformer.interpret.page_file import pack, unpack
from jaxformer.models.config import architecture_name
from jaxformer.models.language_model import LanguageModel


class Compared(NamedTuple):
    """The second model of a page.

    Attributes:
        checkpoint: The model, its variables and its tokenizer, as `jaxformer.load` returns them.
        title: The name of the model on the page.
    """

    checkpoint: Checkpoint
    title: str = ""


def check_comparable(
    model: LanguageModel, tokenizer: Tokenizer | None, other: Checkpoint, inputs: EncodedText
) -> None:
    """Raises ValueError if a page cannot compare two models on a text.

    Args:
        model: The first model.
        tokenizer: The tokenizer of the first model, or None.
        other: The second model, its variables and its tokenizer.
        inputs: The encoded text.
    """
    first, second = model.config, other.model.config
    for name, meaning in (("reads_source", "read a source"), ("bidirectional", "read both sides")):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(
                f"the models to compare are of the types {architecture_name(first)} and "
                f"{architecture_name(second)}; both or neither must {meaning}"
            )
    if why := _tokenizer_difference(tokenizer, other.tokenizer):
        raise ValueError(f"the models to compare must share the tokenizer, but {why}")
    if tokenizer is None and first.vocab_size != second.vocab_size:
        raise ValueError(
            "the models to compare must share the vocabulary, but they have "
            f"{first.vocab_size} and {second.vocab_size} token ids"
        )
    try:
        check_tokens(other.model, inputs)
    except ValueError as error:
        raise ValueError(f"the second model cannot read the text: {error}") from None


def _tokenizer_difference(first: Tokenizer | None, second: Tokenizer | None) -> str | None:
    """Returns how two tokenizers differ; None if every text has the same tokens in both."""
    if first is None or second is None:
        missing = "first" if first is None else "second"
        return None if first is second else f"the {missing} model has none"
    if first.vocab_size != second.vocab_size:
        return f"they have {first.vocab_size} and {second.vocab_size} tokens"
    ids = range(first.vocab_size)
    names, other_names = token_names(first, ids), token_names(second, ids)
    wrong = next((i for i in ids if names[i] != other_names[i]), None)
    if wrong is not None:
        return f"token {wrong} is {names[wrong]!r} in one and {other_names[wrong]!r} in the other"
    return None


def compare_data(
    model: LanguageModel, variables: Any, title: str, compared: Compared, inputs: EncodedText
) -> dict[str, Any]:
    """Runs both models on a text and returns the data of the tab.

    Args:
        model: The first model.
        variables: The first model's variables.
        title: The name of the first model.
        compared: The second model.
        inputs: The encoded text.
    """
    other = compared.checkpoint
    dense = {"params": dense_all(other.variables["params"])}
    second_title = compared.title or "second model"
    if second_title == title:  # Two runs may have folders of the same name.
        second_title += " (second)"
    runs = ((model, variables, title), (other.model, dense, second_title))
    # A masked language model predicts the token at its own position.
    offset = 0 if model.config.bidirectional else 1
    targets = np.asarray(inputs.tokens[offset:], int)
    found, log_shares = [], []
    for one, weights, name in runs:
        passed, captured = run_captured(one, weights, inputs)
        log_shares.append(log_softmax(np.asarray(passed.logits[0], np.float64)))
        attention = attention_data(one, captured, len(inputs.tokens))
        found.append({"title": name, **_scores(log_shares[-1], targets), "attention": attention})
    divergence = jensen_shannon(*log_shares)
    return {"offset": offset, "models": found, "divergence": pack(divergence, "float32")}


def shown_ids(compared: dict[str, Any]) -> set[int]:
    """Returns the ids of the tokens that the tab names."""
    return {int(i) for one in compared["models"] for i in np.unique(unpack(one["top"]["ids"]))}


def _scores(log_shares: Float[np.ndarray, "length vocab"], targets: np.ndarray) -> dict[str, Any]:
    """Returns the largest probabilities at each position, and the loss of each target."""
    best = np.argsort(-log_shares, axis=-1, kind="stable")[:, :NUM_SHOWN]
    loss = -log_shares[np.arange(len(targets)), targets]
    return {
        "top": {
            "ids": pack(best, "int32"),
            "shares": pack(np.exp(np.take_along_axis(log_shares, best, axis=-1)), "float32"),
        },
        "loss": pack(loss, "float32"),
    }


def log_softmax(logits: Float[np.ndarray, "length vocab"]) -> Float[np.ndarray, "length vocab"]:
    """Returns the logarithms of the probabilities."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def jensen_shannon(
    first: Float[np.ndarray, "length vocab"], second: Float[np.ndarray, "length other"]
) -> Float[np.ndarray, " length"]:
    """Computes the Jensen–Shannon divergence of each position in bits.

    Args:
        first: The first model's log probabilities.
        second: The second model's log probabilities. Tokens that only one model has, for example
            because its vocabulary is padded, have probability 0 in the other model.
    """
    width = max(first.shape[-1], second.shape[-1])
    padded = [
        np.pad(x, ((0, 0), (0, width - x.shape[-1])), constant_values=-np.inf)
        for x in (first, second)
    ]
    middle = np.logaddexp(*padded) - np.log(2)
    total = np.zeros(len(first))
    for log_shares in padded:
        # 0 · log 0 is 0.
        is_possible = log_shares > -np.inf
        ratio = np.subtract(log_shares, middle, out=np.zeros_like(middle), where=is_possible)
        total += (np.exp(log_shares) * ratio).sum(axis=-1) / 2
    return np.clip(total / np.log(2), 0, 1)
