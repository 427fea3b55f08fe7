"""How rotary angles are stretched, so that a model reads further than it was trained to."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.models.config.check import at_least, one_of, positive


class Scaling:
    """What annotates a field for a `RotaryScaling`: on the command line that is one word, and not a
    flag for each of its own fields."""


@dataclass(frozen=True)
class RotaryScaling(Scaling):
    """One of three ways to turn the slow pairs of a head more slowly."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: every pair; llama3, yarn: pairs with long waves, and those between a little"""
    factor: float
    """how many times as slowly"""
    original_length: int = 8192
    """tokens that the model was trained on first; not used by linear"""
    low_frequency_factor: float = 1.0
    """llama3: waves longer than original_length / this are stretched by the whole factor"""
    high_frequency_factor: float = 4.0
    """llama3: waves shorter than original_length / this stay as they are"""
    beta_fast: float = 32.0
    """yarn: pairs that turn so often over original_length stay as they are"""
    beta_slow: float = 1.0
    """yarn: pairs that turn so rarely are stretched by the whole factor"""
    whole_pairs: bool = True
    """yarn: where the two bounds fall between pairs they are moved outwards to one"""
    attention_factor: float | None = None
    """yarn: factor of query and key; None: 0.1 ln(factor) + 1"""

    def __post_init__(self):
        one_of(self)
        at_least(1, self, "original_length")
        positive(self, "factor", "low_frequency_factor", "high_frequency_factor")
        positive(self, "beta_fast", "beta_slow", "attention_factor")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor is {self.high_frequency_factor}; it must be above "
                f"low_frequency_factor ({self.low_frequency_factor})"
            )
