"""Config of rotary scaling, which extends a model to texts longer than its training texts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxformer.models.config.check import check_at_least, check_fields, check_positive
from jaxformer.models.config.needs import Is, Needs


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies by one of three methods.

    A frequency is the angle, in radians per position, by which a pair of features is rotated. Its
    wavelength is 2π divided by the frequency, in positions.

    Reference:
        linear: Chen et al. 2023. llama3: Llama 3.1. yarn: Peng et al. 2023, §3.
    """

    needs: ClassVar[Needs] = {
        "original_length": (Is("kind", "llama3", "yarn"),),
        "low_frequency_factor": (Is("kind", "llama3"),),
        "high_frequency_factor": (Is("kind", "llama3"),),
        "beta_fast": (Is("kind", "yarn"),),
        "beta_slow": (Is("kind", "yarn"),),
        "whole_pairs": (Is("kind", "yarn"),),
        "attention_factor": (Is("kind", "yarn"),),
    }

    kind: Literal["linear", "llama3", "yarn"]
    """linear divides all frequencies by factor; llama3 and yarn divide low frequencies by factor,
    keep high ones, and interpolate between the two"""
    factor: float
    """divisor of the frequencies"""
    original_length: int = 8192
    """context length, in tokens, that the model was first trained with; not used by linear"""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths above original_length / low_frequency_factor are multiplied by factor"""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths below original_length / high_frequency_factor are unchanged"""
    beta_fast: float = 32.0
    """yarn: pairs with at least this many turns over original_length are unchanged"""
    beta_slow: float = 1.0
    """yarn: the frequencies of pairs with at most this many turns over original_length are divided
    by factor"""
    whole_pairs: bool = True
    """yarn: round the two bounds outwards to whole pair indices"""
    attention_factor: float | None = None
    """yarn: factor of the rotated queries and keys; None: 0.1 ln(factor) + 1"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        check_at_least(1, self, "original_length")
        check_positive(self, "factor", "low_frequency_factor", "high_frequency_factor")
        check_positive(self, "beta_fast", "beta_slow", "attention_factor")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor is {self.high_frequency_factor}; it must be above "
                f"low_frequency_factor ({self.low_frequency_factor})"
            )
