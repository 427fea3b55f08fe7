"""Constraints on the next token, which exclude tokens or make them less probable.

The constraints have the same meaning and order as the logits processors of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.models.check import Sources
from jaxformer.models.config.generation import NO_CONSTRAINTS, Constraints, GenerationDefaults
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sequences import bucket

NO_TOKEN = -1  # Id of padding and of tokens that are not generated yet.

Scores = Float[Array, "batch vocab"]  # Logits or log-probabilities.
Tokens = Int[Array, "batch slots"]
Room = Int[Array | np.ndarray, "batch room"]  # The tokens generated so far, then NO_TOKEN.


class Text(NamedTuple):
    """The prompt of each batch element, followed by the tokens generated so far.

    Attributes:
        tokens: int [batch, slots], NO_TOKEN for padding and for tokens that are not generated yet.
        end: int [], number of used columns of `tokens`. The newest token of every batch element is
            in column `end - 1` of `tokens`.
        lengths: int [batch], number of tokens of each batch element.
    """

    tokens: Tokens
    end: Int[Array, ""]
    lengths: Int[Array, " batch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """Constraints on the tokens of one call of `generate` or `beam_search`.

    Some constraints depend on the arguments of the call. All fields except `constraints` are
    computed from these arguments.

    Attributes:
        constraints: the constraints to apply.
        prompts: int [num_prompts, width], padded with NO_TOKEN on the left.
        last_step: the step that generates the last token, max_new_tokens - 1.
        stop_tokens: int [stops], ids that end a sequence.
        read: int [num_prompts, length], the sources or, without sources, the prompts, padded with
            NO_TOKEN on the left. None if no constraint depends on the sources.
    """

    constraints: Constraints = field(metadata={"static": True})
    # The annotations are Any, because JAX transformations also store placeholders in the fields.
    prompts: Any
    last_step: Any
    stop_tokens: Any
    read: Any

    def apply(self, scores: Scores, generated: Room, step: Int[Array, ""]) -> Scores:
        """Applies the constraints to the scores of the next token.

        Args:
            scores: logits or log-probabilities.
            generated: int [batch, room], the tokens generated so far, then NO_TOKEN. Batch elements
                i * n to (i + 1) * n - 1 continue prompt i, where n = batch / num_prompts.
            step: number of tokens generated so far.

        Returns:
            The constrained scores, with −∞ for excluded tokens.
        """
        prompts = _repeat_for_beams(self.prompts, len(generated))
        lengths = (prompts != NO_TOKEN).sum(axis=1)
        tokens = jnp.concatenate([prompts, generated.astype(prompts.dtype)], axis=1)
        text = Text(tokens, prompts.shape[1] + step, lengths + step)
        return constrain(self, scores, text, step)


def build_rules(
    constraints: Constraints,
    prompts: Sequence[Int[np.ndarray, " length"]],
    width: int,
    max_new_tokens: int,
    stop_tokens: Int[Array | np.ndarray, " stops"],
    source: Sources | None = None,
) -> Rules | None:
    """Builds the `Rules` of a call, or returns None for a call without constraints.

    Args:
        constraints: the constraints to apply.
        prompts: the token ids of each prompt.
        width: number of slots to which prompts are padded.
        max_new_tokens: maximum number of tokens to generate.
        stop_tokens: ids that end a sequence.
        source: the source of each prompt. None if the model has no encoder.

    Raises:
        ValueError: a constraint depends on the source's token ids, but the source holds floats.
    """
    if constraints == NO_CONSTRAINTS:
        return None
    texts, read = _pad_left(prompts, width), None
    if constraints.reads_encoder and source is None:
        read = texts
    elif source is not None and constraints.reads_encoder:
        sources = [np.asarray(sequence) for sequence in source]
        if not all(np.issubdtype(sequence.dtype, np.integer) for sequence in sources):
            raise ValueError(
                "source holds floats, but encoder_repetition_penalty and "
                "encoder_no_repeat_ngram_size need token ids; turn these two constraints off"
            )
        read = _pad_left(sources, bucket(max(map(len, sources))))
    return Rules(constraints, texts, np.int32(max_new_tokens - 1), stop_tokens, read)


def _pad_left(texts: Sequence[Int[np.ndarray, " length"]], width: int) -> np.ndarray:
    """Stacks texts into an array [num_texts, width], padded with NO_TOKEN on the left."""
    return np.stack([np.pad(x, (width - len(x), 0), constant_values=NO_TOKEN) for x in texts])


def resolve_constraints(model: LanguageModel, given: Constraints | None) -> Constraints:
    """Returns the caller's constraints, or the checkpoint's constraints if `given` is None.

    Raises:
        ValueError: a constraint names a token id outside the vocabulary, or `given` is None and the
            checkpoint sets generation options that are not implemented.
    """
    if given is None:
        check_supported(model.generation)
    constraints = model.generation.constraints if given is None else given
    constraints.check_ids(model.config.vocab_size)
    return constraints


def check_supported(defaults: GenerationDefaults) -> None:
    """Raises ValueError if the checkpoint sets generation options that are not implemented."""
    if defaults.unsupported:
        names = (option.split("=", 1)[0] for option in defaults.unsupported)
        flags = " ".join(f"--ignore-generation-config {name}" for name in names)
        raise ValueError(
            f"the checkpoint's generation config sets {', '.join(defaults.unsupported)}, which is "
            f"not implemented; to ignore these options, add {flags} on the command line, or pass "
            "constraints=jaxformer.Constraints(…) in Python"
        )


def constrain(rules: Rules, scores: Scores, text: Text, step: Int[Array, ""]) -> Scores:
    """Applies each constraint to the scores, in the order of transformers' logits processors."""
    scores = _exclude_tokens(rules, _bias_tokens(rules, scores, text), text, step)
    scores = _force_tokens(rules, scores, text, step)
    scores = _suppress_tokens(rules.constraints, scores, text, step)
    if rules.constraints.renormalize_logits:
        is_possible = scores > -jnp.inf  # If every token is excluded, log_softmax is NaN.
        normalized = jax.nn.log_softmax(scores, axis=-1)
        scores = jnp.where(is_possible, normalized, scores)
    return scores


def _bias_tokens(rules: Rules, scores: Scores, text: Text) -> Scores:
    """Applies biases and the penalties on tokens that occurred before."""
    constraints = rules.constraints
    # If a word occurs several times in `sequence_bias`, its last bias applies.
    biases = dict(constraints.sequence_bias)
    if single := {word[0]: bias for word, bias in biases.items() if len(word) == 1}:
        scores = scores.at[:, np.array([*single])].add(np.array([*single.values()], np.float32))
    for word, bias in biases.items():
        if len(word) > 1:
            completes = _ends_with(text, word[:-1])
            scores = scores.at[:, word[-1]].add(jnp.where(completes, bias, 0.0))
    if constraints.encoder_repetition_penalty != 1.0:
        penalty = 1 / constraints.encoder_repetition_penalty
        scores = penalize_repetition(scores, _repeat_for_beams(rules.read, len(scores)), penalty)
    if constraints.repetition_penalty != 1.0:
        scores = penalize_repetition(scores, text.tokens, constraints.repetition_penalty)
    if constraints.frequency_penalty or constraints.presence_penalty:
        counts = _count_tokens(text.tokens[:, rules.prompts.shape[1] :], scores.shape[-1])
        scores -= constraints.frequency_penalty * counts
        scores -= constraints.presence_penalty * (counts > 0)
    return scores


def _exclude_tokens(rules: Rules, scores: Scores, text: Text, step: Int[Array, ""]) -> Scores:
    """Excludes repeated n-grams, bad words and, while the text is too short, stop tokens."""
    constraints, stops = rules.constraints, rules.stop_tokens
    if size := constraints.no_repeat_ngram_size:
        repeated = repeated_ngrams(text, text.tokens, size, scores.shape[-1])
        scores = jnp.where(repeated, -jnp.inf, scores)
    if size := constraints.encoder_no_repeat_ngram_size:
        repeated = repeated_ngrams(
            text, _repeat_for_beams(rules.read, len(scores)), size, scores.shape[-1]
        )
        scores = jnp.where(repeated, -jnp.inf, scores)
    for word in constraints.bad_words_ids:
        # A bad word that is a stop token is ignored.
        may_stop = (len(word) == 1) & (word[0] == stops).any()
        completes = _ends_with(text, word[:-1]) & ~may_stop
        scores = scores.at[:, word[-1]].add(jnp.where(completes, -jnp.inf, 0.0))
    too_short = text.lengths < constraints.min_length
    too_short |= step < constraints.min_new_tokens
    return jnp.where(too_short[:, None] & _vocabulary_mask(stops, scores), -jnp.inf, scores)


def _force_tokens(rules: Rules, scores: Scores, text: Text, step: Int[Array, ""]) -> Scores:
    """Forces the first and the last token, and makes stop tokens more probable in long texts."""
    constraints, stops = rules.constraints, rules.stop_tokens
    is_second = text.lengths == 1
    if constraints.forced_bos_token_id is not None:
        scores = _force((constraints.forced_bos_token_id,), scores, is_second[:, None])
    if constraints.forced_eos_token_id:
        scores = _force(constraints.forced_eos_token_id, scores, step == rules.last_step)
    if constraints.exponential_decay_length_penalty is not None:
        start, factor = constraints.exponential_decay_length_penalty
        grown = scores + jnp.abs(scores) * (factor ** jnp.maximum(step - start, 0) - 1)
        grows = _vocabulary_mask(stops, scores) & jnp.isfinite(scores)
        scores = jnp.where(grows & (step > start), grown, scores)
    return scores


def _suppress_tokens(
    constraints: Constraints, scores: Scores, text: Text, step: Int[Array, ""]
) -> Scores:
    """Applies allowed_tokens, suppress_tokens and begin_suppress_tokens."""
    if constraints.allowed_tokens:
        scores = jnp.where(_vocabulary_mask(constraints.allowed_tokens, scores), scores, -jnp.inf)
    if constraints.suppress_tokens:
        scores = jnp.where(_vocabulary_mask(constraints.suppress_tokens, scores), -jnp.inf, scores)
    if constraints.begin_suppress_tokens:
        # If the first token is forced, suppression applies to the second generated token.
        is_first = step == 0
        if constraints.forced_bos_token_id is not None:
            is_first = jnp.where(text.lengths - step == 1, step == 1, step == 0)[:, None]
        suppressed = _vocabulary_mask(constraints.begin_suppress_tokens, scores) & is_first
        scores = jnp.where(suppressed, -jnp.inf, scores)
    return scores


def _repeat_for_beams(ids: Any, batch_size: int) -> Int[Array, "batch length"]:
    """Repeats each sequence of `ids` to fill the batch, keeping the repetitions adjacent."""
    return jnp.repeat(jnp.asarray(ids), batch_size // len(ids), axis=0)


def penalize_repetition(scores: Scores, tokens: Tokens, penalty: float) -> Scores:
    """Divides positive scores of `tokens` by the penalty and multiplies negative scores by it."""
    penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(_token_mask(tokens, scores.shape[-1]), penalized, scores)


def repeated_ngrams(text: Text, read: Tokens, size: int, vocab_size: int) -> Array:
    """Returns bool [batch, vocab], True for tokens that would complete an n-gram of `read`."""
    before = size - 1  # The number of tokens of an n-gram before its last token.
    matches = (jnp.arange(read.shape[1], dtype=jnp.int32) >= before) & (text.end >= before)
    for offset in range(1, before + 1):
        earlier = jnp.roll(read, offset, axis=1)  # `earlier[:, s]` is `read[:, s - offset]`.
        last = jnp.take(text.tokens, jnp.maximum(text.end - offset, 0), axis=1)[:, None]
        matches = matches & (earlier == last) & (last != NO_TOKEN)
    return _token_mask(jnp.where(matches, read, NO_TOKEN), vocab_size)


def _ends_with(text: Text, word: tuple[int, ...]) -> Array:
    """Returns bool [batch], True where the text ends with the tokens of `word`."""
    ends = jnp.ones(len(text.lengths), bool)
    for offset, token in enumerate(reversed(word), 1):
        slot = text.end - offset
        ends &= (jnp.take(text.tokens, jnp.maximum(slot, 0), axis=1) == token) & (slot >= 0)
    return ends


def _token_mask(tokens: Tokens, vocab_size: int) -> Array:
    """Returns bool [batch, vocab], True for tokens that occur in the batch element."""
    nowhere = jnp.zeros((len(tokens), vocab_size + 1), bool)
    columns = jnp.where(tokens == NO_TOKEN, vocab_size, tokens)
    batch_indices = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    return nowhere.at[batch_indices, columns].set(True)[:, :vocab_size]


def _count_tokens(tokens: Tokens, vocab_size: int) -> Array:
    """Returns float [batch, vocab], how often each token occurs in the batch element."""
    counts = jnp.zeros((len(tokens), vocab_size + 1), jnp.float32)
    columns = jnp.where(tokens == NO_TOKEN, vocab_size, tokens)
    batch_indices = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    return counts.at[batch_indices, columns].add(1.0)[:, :vocab_size]


def _vocabulary_mask(ids: Any, scores: Scores) -> Array:
    """Returns bool [vocab], True for the given token ids."""
    return jnp.zeros(scores.shape[-1], bool).at[jnp.asarray(ids, jnp.int32)].set(True)


def _force(ids: tuple[int, ...], scores: Scores, where: Bool[Array, "..."]) -> Array:
    """Where `where` is True, sets the scores of `ids` to 0 and all other scores to −∞."""
    forced = jnp.where(_vocabulary_mask(ids, scores), 0.0, -jnp.inf)
    return jnp.where(where, forced, scores)
