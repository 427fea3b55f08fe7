"""Low-rank updates that are learnt in the place of the weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (Hu et al. 2021): y = x W + (alpha / rank) x A B, of which A and B alone are learnt."""

    lora_rank: int | None = None
    """rank of the updates that are learnt in the place of the weights; None: all weights are"""
    lora_alpha: float = 16.0
    """an update is scaled by alpha / rank"""
    lora_maps: str | None = None
    """which maps have an update, by their names or the ends of their paths: query,value; None:
    query and value or, of a model without them, every map but the head"""

    def __post_init__(self):
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank is {self.lora_rank}; it must be at least 1")
        if not 0 < self.lora_alpha < 1e6:
            raise ValueError(f"lora_alpha is {self.lora_alpha}; it must be above 0 and finite")

    @property
    def scale(self) -> float:
        """By which an update is multiplied; without one, 1."""
        return 1.0 if self.lora_rank is None else self.lora_alpha / self.lora_rank
