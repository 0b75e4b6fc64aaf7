"""Aggressive admission under a watermark (the baseline of Past-Future, section 3; vLLM's rule)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WatermarkAdmission:
    """Admits while what is held *now* plus the newcomer stays below a share of the pool; future growth is ignored.

    Attributes:
        watermark: Share of the pool's blocks, in (0, 1].
    """

    watermark: float

    def admits(self, used_blocks: int, new_blocks: int, num_blocks: int) -> bool:
        """Whether a request of ``new_blocks`` may start; an empty pool takes whatever fits at all."""
        if used_blocks == 0:
            return new_blocks <= num_blocks
        return used_blocks + new_blocks <= num_blocks - self.reserve_blocks(num_blocks)

    def reserve_blocks(self, num_blocks: int) -> int:
        """Blocks that stay free for the growth of running sequences."""
        return num_blocks - int(self.watermark * num_blocks)
