"""Config of LoRA, which trains low-rank updates of frozen base weights."""

from dataclasses import dataclass
from typing import ClassVar

from jaxformer.models.config.check import check_fields
from jaxformer.models.config.needs import Needs, is_given


@dataclass(frozen=True)
class LoraConfig:
    """Config of LoRA: y = x W + (alpha / rank) x A B, where only A and B are trained.

    Reference:
        Hu et al. 2021.
    """

    needs: ClassVar[Needs] = {
        "lora_alpha": (is_given("lora_rank"),),
        "lora_target_modules": (is_given("lora_rank"),),
    }

    lora_rank: int | None = None
    """rank of the LoRA updates, which are trained instead of the weights; default: no LoRA, all
    weights are trained"""
    lora_alpha: float = 16.0
    """LoRA updates are multiplied by lora_alpha / lora_rank"""
    lora_target_modules: str | None = None
    """linear layers with a LoRA update, as a comma-separated list of names or path endings:
    query,value; default: query and value or, if the model has no such layers, all layers except the
    output head"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank is {self.lora_rank}; it must be at least 1")
        if not 0 < self.lora_alpha < 1e6:
            raise ValueError(f"lora_alpha is {self.lora_alpha}; it must be above 0 and finite")

    @property
    def scale(self) -> float:
        """The factor of the updates, alpha / rank; 1 without LoRA."""
        return 1.0 if self.lora_rank is None else self.lora_alpha / self.lora_rank
