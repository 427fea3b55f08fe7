"""Constraints on the next token: they exclude tokens or make them less probable.

The order and the meaning of each are those of the logits processors of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.models.config.generation import NO_CONSTRAINTS, Constraints, GenerationDefaults
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.rows import bucket

NO_TOKEN = -1  # in a text: padding and tokens that are not generated yet

Scores = Float[Array, "batch vocab"]  # logits or log-probabilities
Tokens = Int[Array, "batch slots"]
Room = Int[Array | np.ndarray, "batch room"]  # the tokens generated so far, then NO_TOKEN


class Text(NamedTuple):
    """The tokens of each row so far.

    Attributes:
        tokens: int [batch, slots], NO_TOKEN for padding and for tokens that are not generated yet.
        end: int [], number of slots in use; the last token of every row is in the slot before.
        lengths: int [batch], number of tokens of each row.
    """

    tokens: Tokens
    end: Int[Array, ""]
    lengths: Int[Array, " batch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """The constraints of one call, with the properties of the call that they depend on.

    Attributes:
        constraints: the constraints to apply.
        prompts: int [batch, width], with NO_TOKEN on the left of shorter ones.
        last_step: the step that generates the last token, at max_new_tokens.
        stop_tokens: int [stops], ids that end a row.
        read: int [batch, length], the sources or, without sources, the prompts, with NO_TOKEN on
            the left of shorter ones; None: no constraint depends on them.
    """

    constraints: Constraints = field(metadata={"static": True})
    prompts: Any  # not annotated as an array: JAX also fills the fields with placeholders
    last_step: Any
    stop_tokens: Any
    read: Any

    def apply(self, scores: Scores, generated: Room, step: Int[Array, ""]) -> Scores:
        """Applies the constraints to the scores of the next token.

        Args:
            scores: logits or log-probabilities.
            generated: the tokens generated before, then NO_TOKEN. Prompt i has the rows i * n to (i
                + 1) * n - 1, where n = batch / len(prompts).
            step: number of tokens generated before.

        Returns:
            The scores, −∞ for tokens that may not come next.
        """
        prompts = _repeated(self.prompts, len(generated))
        lengths = (prompts != NO_TOKEN).sum(axis=1)
        tokens = jnp.concatenate([prompts, generated.astype(prompts.dtype)], axis=1)
        text = Text(tokens, prompts.shape[1] + step, lengths + step)
        return constrain(self, scores, text, step)


def rules_of(
    constraints: Constraints,
    prompts: Sequence[Int[np.ndarray, " length"]],
    width: int,
    max_new_tokens: int,
    stop_tokens: Int[Array | np.ndarray, " stops"],
    source: Any = None,
) -> Rules | None:
    """Returns the constraints of a call as a value; None if there are none.

    Args:
        constraints: the constraints to apply.
        prompts: rows of ids.
        width: number of slots of the longest prompt.
        max_new_tokens: the most tokens to generate.
        stop_tokens: ids that end a row.
        source: the source of each prompt, rows of ids; None: the model reads none.

    Raises:
        ValueError: a constraint depends on the source, which is not given as ids.
    """
    if constraints == NO_CONSTRAINTS:
        return None
    texts, read = _stacked(prompts, width), None
    if constraints.reads_encoder and source is None:
        read = texts
    elif constraints.reads_encoder:
        sources = [np.asarray(row) for row in source]
        if not all(np.issubdtype(row.dtype, np.integer) for row in sources):
            raise ValueError(
                "source holds embeddings; encoder_repetition_penalty and "
                "encoder_no_repeat_ngram_size need token ids"
            )
        read = _stacked(sources, bucket(max(map(len, sources))))
    return Rules(constraints, texts, np.int32(max_new_tokens - 1), stop_tokens, read)


def _stacked(rows: Sequence[Int[np.ndarray, " length"]], width: int) -> np.ndarray:
    """Returns rows of ids as an array [rows, width], with NO_TOKEN on the left of shorter ones."""
    return np.stack([np.pad(x, (width - len(x), 0), constant_values=NO_TOKEN) for x in rows])


def constraints_of_call(model: LanguageModel, given: Constraints | None) -> Constraints:
    """Returns the constraints of a call, or else those of the model's checkpoint.

    Raises:
        ValueError: a constraint names a token that the model lacks, or `given` is None and the
            checkpoint has options that are not implemented.
    """
    if given is None:
        check_supported(model.generation)
    constraints = model.generation.constraints if given is None else given
    constraints.check_ids(model.config.vocab_size)
    return constraints


def check_supported(defaults: GenerationDefaults) -> None:
    """Raises ValueError if the checkpoint has options for generation that are not implemented."""
    if defaults.unsupported:
        names = (option.split("=", 1)[0] for option in defaults.unsupported)
        flags = " ".join(f"--ignore-generation-config {name}" for name in names)
        raise ValueError(
            f"this checkpoint generates with {', '.join(defaults.unsupported)}, which is not "
            f"implemented; to go on without it, add {flags} on the command line, or give "
            "constraints (jaxformer.Constraints() for none) in Python"
        )


def constrain(rules: Rules, scores: Scores, text: Text, step: Int[Array, ""]) -> Scores:
    """Applies the constraints one after the other, in the order of transformers."""
    constraints, stops = rules.constraints, rules.stop_tokens
    for word, bias in dict(constraints.sequence_bias).items():  # a repeated word: its last bias
        completes = _ends_with(text, word[:-1])
        scores = scores.at[:, word[-1]].add(jnp.where(completes, bias, 0.0))
    if constraints.encoder_repetition_penalty != 1.0:
        penalty = 1 / constraints.encoder_repetition_penalty
        scores = penalize_repetition(scores, _repeated(rules.read, len(scores)), penalty)
    if constraints.repetition_penalty != 1.0:
        scores = penalize_repetition(scores, text.tokens, constraints.repetition_penalty)
    if size := constraints.no_repeat_ngram_size:
        repeated = repeated_ngrams(text, text.tokens, size, scores.shape[-1])
        scores = jnp.where(repeated, -jnp.inf, scores)
    if size := constraints.encoder_no_repeat_ngram_size:
        repeated = repeated_ngrams(text, _repeated(rules.read, len(scores)), size, scores.shape[-1])
        scores = jnp.where(repeated, -jnp.inf, scores)
    for word in constraints.bad_words_ids:
        may_stop = (len(word) == 1) & (word[0] == stops).any()  # a stop token stays possible
        completes = _ends_with(text, word[:-1]) & ~may_stop
        scores = scores.at[:, word[-1]].add(jnp.where(completes, -jnp.inf, 0.0))
    too_short = text.lengths < constraints.min_length
    too_short |= step < constraints.min_new_tokens
    scores = jnp.where(too_short[:, None] & _one_of(stops, scores), -jnp.inf, scores)
    is_second = text.lengths == 1
    if constraints.forced_bos_token_id is not None:
        scores = _force((constraints.forced_bos_token_id,), scores, is_second[:, None])
    if constraints.forced_eos_token_id:
        scores = _force(constraints.forced_eos_token_id, scores, step == rules.last_step)
    if constraints.exponential_decay_length_penalty is not None:
        start, factor = constraints.exponential_decay_length_penalty
        grown = scores + jnp.abs(scores) * (factor ** jnp.maximum(step - start, 0) - 1)
        grows = _one_of(stops, scores) & jnp.isfinite(scores)
        scores = jnp.where(grows & (step > start), grown, scores)
    if constraints.suppress_tokens:
        scores = jnp.where(_one_of(constraints.suppress_tokens, scores), -jnp.inf, scores)
    if constraints.begin_suppress_tokens:
        # After a forced token, it is the first token that is not forced.
        is_first = step == 0
        if constraints.forced_bos_token_id is not None:
            is_first = jnp.where(text.lengths - step == 1, step == 1, step == 0)[:, None]
        suppressed = _one_of(constraints.begin_suppress_tokens, scores) & is_first
        scores = jnp.where(suppressed, -jnp.inf, scores)
    if constraints.renormalize_logits:
        is_possible = scores > -jnp.inf  # without any possible token, the result would be NaN
        normalized = jax.nn.log_softmax(scores, axis=-1)
        scores = jnp.where(is_possible, normalized, scores)
    return scores


def _repeated(ids: Any, rows: int) -> Int[Array, "rows length"]:
    """Repeats row i for the rows i * n to (i + 1) * n - 1, where n = rows / len(ids)."""
    return jnp.repeat(jnp.asarray(ids), rows // len(ids), axis=0)


def penalize_repetition(scores: Scores, tokens: Tokens, penalty: float) -> Scores:
    """Divides positive scores of these tokens by the penalty and multiplies negative ones by it."""
    penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(_mark(tokens, scores.shape[-1]), penalized, scores)


def repeated_ngrams(text: Text, read: Tokens, size: int, vocab_size: int) -> Array:
    """Returns bool [batch, vocab]: tokens that would repeat an n-gram of `read` in the text."""
    before = size - 1  # tokens of an n-gram before its last
    matches = (jnp.arange(read.shape[1], dtype=jnp.int32) >= before) & (text.end >= before)
    for offset in range(1, before + 1):
        earlier = jnp.roll(read, offset, axis=1)  # at slot s: the token at s − offset
        last = jnp.take(text.tokens, jnp.maximum(text.end - offset, 0), axis=1)[:, None]
        matches = matches & (earlier == last) & (last != NO_TOKEN)
    return _mark(jnp.where(matches, read, NO_TOKEN), vocab_size)


def _ends_with(text: Text, word: tuple[int, ...]) -> Array:
    """Returns bool [batch]: whether the text ends with these tokens."""
    ends = jnp.ones(len(text.lengths), bool)
    for offset, token in enumerate(reversed(word), 1):
        slot = text.end - offset
        ends &= (jnp.take(text.tokens, jnp.maximum(slot, 0), axis=1) == token) & (slot >= 0)
    return ends


def _mark(tokens: Tokens, vocab_size: int) -> Array:
    """Returns bool [batch, vocab]: which tokens the rows hold."""
    nowhere = jnp.zeros((len(tokens), vocab_size + 1), bool)
    places = jnp.where(tokens == NO_TOKEN, vocab_size, tokens)
    rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    return nowhere.at[rows, places].set(True)[:, :vocab_size]


def _one_of(ids: Any, scores: Scores) -> Array:
    """Returns bool [vocab]: which tokens are among the ids."""
    vocabulary = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return (vocabulary[:, None] == jnp.asarray(ids, jnp.int32)).any(axis=-1)


def _force(ids: tuple[int, ...], scores: Scores, where: Bool[Array, "..."]) -> Array:
    """Sets the scores of these ids to 0 and the remaining scores to −∞ where `where` is true."""
    forced = jnp.where(_one_of(ids, scores), 0.0, -jnp.inf)
    return jnp.where(where, forced, scores)
