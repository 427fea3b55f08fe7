"""Generation defaults of a checkpoint. Arguments of a call override these defaults.

The fields have the same names as in the generation_config.json of transformers.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from jaxformer.models.config.check import (
    check_at_least,
    check_fields,
    check_finite,
    check_positive,
)

Ids = tuple[int, ...]
_ID_FIELDS = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "allowed_tokens")


@dataclass(frozen=True)
class Constraints:
    """Constraints on the next token, given the tokens before.

    Below, "text" means the prompt and the generated tokens of a batch element. For an
    encoder-decoder, "text" means only the decoder's tokens.
    """

    repetition_penalty: float = 1.0
    """divides the positive scores, and multiplies the negative scores, of tokens that already occur
    in the text (Keskar et al. 2019)"""
    frequency_penalty: float = 0.0
    """number to subtract from the score of a token for each time that it has been generated"""
    presence_penalty: float = 0.0
    """number to subtract from the score of a token that has been generated at least once"""
    no_repeat_ngram_size: int = 0
    """no n-gram of this size occurs twice in the text; 0: no such constraint"""
    bad_words_ids: tuple[Ids, ...] = ()
    """token sequences that are never generated"""
    min_length: int = 0
    """stop tokens are excluded until the text has this many tokens"""
    min_new_tokens: int = 0
    """stop tokens are excluded until this many tokens have been generated"""
    forced_bos_token_id: int | None = None
    """token at the second position of the text; it only has an effect if the prompt has one
    token"""
    forced_eos_token_id: Ids = ()
    """if the text has not stopped before, the last token that is generated is one of these"""
    allowed_tokens: Ids = ()
    """the only tokens that may be generated, so a text stops early only if they include a stop
    token; (): all tokens"""
    suppress_tokens: Ids = ()
    """tokens that are never generated"""
    begin_suppress_tokens: Ids = ()
    """tokens that are excluded in the first step or, after a forced first token, in the second"""
    sequence_bias: tuple[tuple[Ids, float], ...] = ()
    """pairs of a token sequence and a number, which is added to the score of the sequence's last
    token if the text ends with the tokens before it"""
    encoder_repetition_penalty: float = 1.0
    """multiplies the positive scores, and divides the negative scores, of tokens of the source
    (without a source: of the prompt)"""
    encoder_no_repeat_ngram_size: int = 0
    """no n-gram of this size of the source (without a source: of the prompt) is generated; 0: no
    such constraint"""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(start, factor): when start + n tokens have been generated, |s| · (factorⁿ − 1) is added to
    the score s of each stop token"""
    renormalize_logits: bool = False
    """the log-probabilities of the tokens that are not excluded are normalized again; this changes
    the scores of a beam search"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        check_at_least(0, self, "no_repeat_ngram_size", "min_length", "min_new_tokens")
        check_at_least(0, self, "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")
        check_at_least(0, self, "begin_suppress_tokens", "encoder_no_repeat_ngram_size")
        check_at_least(0, self, "allowed_tokens")
        check_finite(self, "frequency_penalty", "presence_penalty")
        check_positive(self, "repetition_penalty", "encoder_repetition_penalty")
        for name, words in self._words.items():
            for word in words:
                if not word or min(word) < 0:
                    raise ValueError(f"{name} contains {word}; token ids must be at least 0")
        if self.exponential_decay_length_penalty is not None:
            start, factor = self.exponential_decay_length_penalty
            if start < 0 or not 0.0 < factor < float("inf"):
                raise ValueError(
                    f"exponential_decay_length_penalty is {(start, factor)}; it must be "
                    "(start, factor), with start at least 0 and factor above 0 and finite"
                )

    @property
    def _words(self) -> dict[str, tuple[Ids, ...]]:
        """The token sequences of `bad_words_ids` and `sequence_bias`, by the name of the field."""
        biased = tuple(word for word, _ in self.sequence_bias)
        return {"bad_words_ids": self.bad_words_ids, "sequence_bias": biased}

    @property
    def reads_encoder(self) -> bool:
        """Whether a constraint depends on the source."""
        return self.encoder_repetition_penalty != 1.0 or self.encoder_no_repeat_ngram_size > 0

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError if a token id is not below `vocab_size`."""
        named = {name: tuple(chain(*words)) for name, words in self._words.items()}
        first = self.forced_bos_token_id
        named["forced_bos_token_id"] = () if first is None else (first,)
        for name in _ID_FIELDS:
            named[name] = getattr(self, name)
        for name, ids in named.items():
            if ids and max(ids) >= vocab_size:
                raise ValueError(
                    f"{name} has the token id {max(ids)}; the model has ids 0 … {vocab_size - 1}"
                )


NO_CONSTRAINTS = Constraints()


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults for the arguments of `generate`, `beam_search` and the command line.

    A field is None if the checkpoint does not set the option; callers then use their own defaults.
    For a checkpoint from transformers, missing options have the defaults of transformers.
    """

    constraints: Constraints = NO_CONSTRAINTS
    do_sample: bool | None = None
    """sample each token from its distribution; False: choose the most probable token"""
    temperature: float | None = None
    """this field and the next six: see `Sampler`; without do_sample, these fields apply only to a
    call that sets a temperature"""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    num_beams: int | None = None
    """beam width; 1: greedy decoding"""
    length_penalty: float | None = None
    """see `beam_search`"""
    early_stopping: bool | Literal["never"] | None = None
    """see `beam_search`"""
    max_length: int | None = None
    """maximum number of tokens of prompt and generated text together"""
    max_new_tokens: int | None = None
    """maximum number of generated tokens"""
    bos_token_id: int | None = None
    """this field and the next three: special token ids, which `export` writes for a checkpoint
    without a tokenizer"""
    eos_token_id: Ids = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    unsupported: tuple[str, ...] = ()
    """options of the checkpoint, as "name=value", that affect generation and are not implemented.
    With any of them, generation raises an error unless the call passes `constraints`, or the
    command line has --ignore-generation-config"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        check_at_least(1, self, "num_beams", "max_length", "max_new_tokens")
        check_at_least(0, self, "top_k", "bos_token_id", "eos_token_id", "pad_token_id")
        check_at_least(0, self, "decoder_start_token_id")

    def most_new_tokens(self, prompt_length: int, max_length: int) -> int | None:
        """Returns the checkpoint's maximum number of new tokens, or None.

        Args:
            prompt_length: Number of tokens of the prompt.
            max_length: The model's maximum length of the prompt plus the generated text, in tokens.
        """
        if self.max_new_tokens is not None:
            most = self.max_new_tokens
        elif self.max_length is not None:
            most = max(self.max_length - prompt_length, 1)
        else:
            return None
        return min(most, max_length - prompt_length)
