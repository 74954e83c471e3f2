"""What the loss tests share: a specification per algorithm, and random rollouts of one step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpofit.algo.losses import ALGORITHMS, Denominator, LossOutput, LossSpec, count_denominator, policy_loss

LOSSES = sorted(ALGORITHMS)
INVARIANT = [name for name in LOSSES if name != "bnpo"]


def spec_of(loss: str, **changes: object) -> LossSpec:
    """The algorithm with its own ratio and clips, GSPO's widened so that both clipped and free rows occur."""
    row = ALGORITHMS[loss]
    clips = {"gspo": (0.05, 0.08), "cispo": (0.2, 1.1)}.get(loss, (row.clip_low, row.clip_high))
    base = LossSpec(loss=loss, max_completion_tokens=9, ratio=row.ratio, clip_low=clips[0], clip_high=clips[1])
    return replace(base, **changes)


class Step:
    """Random rollouts of one step, float64: [6, 5], ragged, row 3 masked as a whole, ratios from 0.4 to 2.5."""

    def __init__(self, seed: int = 0, rows: int = 6, width: int = 5, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.old = (-3 * draw(rows, width)).to(dtype)
        self.logprobs = (self.old + 1.8 * draw(rows, width) - 0.9).to(dtype)
        self.ref = (self.old + draw(rows, width) - 0.5).to(dtype)
        self.entropy = (2 * draw(rows, width)).to(dtype)
        self.advantages = (4 * draw(rows) - 2).to(dtype)
        self.lengths = [1 + int(width * draw(1)) for _ in range(rows)]
        self.lengths[3 % rows] = 0
        self.mask = torch.tensor([[int(t < n) for t in range(width)] for n in self.lengths])

    def gradient(self, spec: LossSpec, parts: list[list[int]], on_policy: bool = False) -> tuple[float, Tensor, Tensor]:
        """Loss and gradients of logprobs and entropies, summed over micro batches of these rows."""
        logprobs, entropy = self.logprobs.clone().requires_grad_(), self.entropy.clone().requires_grad_()
        denominator = count_denominator(self.lengths, micro_batches=len(parts))
        total = 0.0
        for part in parts:
            output = self.part(spec, logprobs, entropy, part, denominator, on_policy)
            output.loss.backward()
            total += output.loss.item()
        entropy_gradient = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
        return total, logprobs.grad, entropy_gradient

    def part(
        self,
        spec: LossSpec,
        logprobs: Tensor,
        entropy: Tensor,
        rows: list[int],
        denominator: Denominator,
        on_policy: bool = False,
    ) -> LossOutput:
        return policy_loss(
            spec,
            logprobs[rows],
            None if on_policy else self.old[rows],
            self.advantages[rows],
            self.mask[rows],
            denominator,
            ref_logprobs=self.ref[rows],
            entropy=entropy[rows],
        )
