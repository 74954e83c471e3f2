"""The one protocol behind which every rollout engine stands.

Owns what an engine takes and gives. Must not know how any engine samples, nor what becomes of its completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from grpofit.types import Completion, Prompt, RolloutKey, Sampling

Progress = Callable[[int, int], None]
"""Called at every token with (completions finished, all); may raise KeyboardInterrupt to abandon the rollout."""


class Engine(Protocol):
    """Samples completions from the policy's current weights."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[RolloutKey],
        sampling: Sampling,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """One completion per row.

        Args:
            prompts: the prompt of each row; rows of one prompt are adjacent.
            keys: the random key of each row. Equal key, weights and prompt give the same completion whatever else
                is in the batch (float32; in bfloat16 batch shape rounds differently and a few rows may differ).
            sampling: length limit, temperature, truncation, stop strings.
        """
        ...
