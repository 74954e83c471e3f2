"""The GRPO step, the only implementation of it.

Owns the order: rollouts, rewards, advantages, micro batches, logprobs, loss, backward, clip, finite check, optimizer.
`collect` samples and scores, `update` is the tensor part. Must not know about files, displays or configurations.

`update` has no data-dependent shapes and reads the device once per optimizer update, through `read_back`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpofit.algo.advantages import advantages, has_signal
from grpofit.algo.losses import LossOutput, LossSpec, count_denominator, policy_loss
from grpofit.algo.packing import Packing
from grpofit.data.batching import MicroBatch, make_micro_batches
from grpofit.data.prompts import prompts_for_step
from grpofit.data.verify import RewardReport, RewardRunner
from grpofit.memory.settings import MemorySettings
from grpofit.models.attention import reading_packed_rows
from grpofit.models.compiling import CompiledLayers
from grpofit.models.head import token_logprobs
from grpofit.models.load import Policy
from grpofit.rollout.base import Engine
from grpofit.training.clock import Clock
from grpofit.training.optim import MasterAdamW
from grpofit.types import Prompt, Rollout, RolloutKey, Sampling


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The plain values of a step. Units and meanings as in `config.tree`."""

    seed: int
    prompts_per_step: int
    group_size: int
    sampling: Sampling
    loss: LossSpec
    advantage: str
    combine: str
    iterations_per_batch: int
    mask_truncated: bool
    count_all_groups: bool
    max_grad_norm: float | None
    memory: MemorySettings

    @property
    def needs_every_group(self) -> bool:
        """Whether groups without signal act on the gradient: by KL, entropy, or bnpo's mean over a micro batch."""
        return self.loss.beta > 0 or self.loss.entropy_bonus > 0 or self.loss.loss == "bnpo"


@dataclass(slots=True)
class StepParts:
    """What a step works with. `reference` is None unless beta > 0, `compiled` where layers run as they are.

    `notes`: what a user should be told about how the parts were made.
    """

    policy: Policy
    reference: Policy | None
    engine: Engine
    rewards: RewardRunner
    prompts: Sequence[Prompt]
    optimizer: MasterAdamW
    settings: StepSettings
    clock: Clock
    compiled: CompiledLayers | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def models(self) -> list[PreTrainedModel]:
        """What computes logprobs."""
        return [self.policy.model] if self.reference is None else [self.policy.model, self.reference.model]

    @property
    def packed(self) -> bool:
        """Whether the completions of a group share a row."""
        return self.settings.memory.packing and self.policy.packs


@dataclass(slots=True)
class UpdateResult:
    """What one optimizer update did. `metrics` cover the rows that were trained; `rows` counts them.

    `tokens` passed through the network in forward and backward, padding and repeated prompts included, in so many
    `micro_batches`.
    """

    loss: float
    grad_norm: float
    rows: int
    tokens: int
    micro_batches: int
    weights_changed_frac: float | None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether the optimizer moved."""
        return self.weights_changed_frac is not None


def collect(parts: StepParts, step: int, max_steps: int) -> tuple[list[Rollout], RewardReport]:
    """Sample, score, and set rewards and advantages. `step` is 0-based and names every random draw."""
    settings, clock = parts.settings, parts.clock
    with clock.phase("rollout") as progress:
        chosen = prompts_for_step(parts.prompts, settings.prompts_per_step, settings.seed, step)
        keys = rollout_keys(chosen, settings.group_size, settings.seed, step)
        rows = [prompt for prompt in chosen for _ in range(settings.group_size)]
        completions = parts.engine.generate(rows, keys, settings.sampling, progress)
        rollouts = [
            Rollout(prompt, completion, group=i // settings.group_size, sample=i % settings.group_size)
            for i, (prompt, completion) in enumerate(zip(rows, completions, strict=True))
        ]
    with clock.phase("reward"):
        report = parts.rewards.score(rollouts, step=step, max_steps=max_steps)
        set_advantages(rollouts, settings, parts.rewards.weights)
    return rollouts, report


def rollout_keys(prompts: Sequence[Prompt], group_size: int, seed: int, step: int) -> list[RolloutKey]:
    """One key per row; a prompt that stands twice in a step gets fresh samples the second time."""
    seen: dict[int, int] = {}
    keys = []
    for prompt in prompts:
        first = seen.get(prompt.row_id, 0)
        seen[prompt.row_id] = first + group_size
        keys += [RolloutKey(seed, step, prompt.row_id, first + i) for i in range(group_size)]
    return keys


def set_advantages(rollouts: Sequence[Rollout], settings: StepSettings, weights: Sequence[float]) -> None:
    """Fill `advantage` from the scores, float32 on the CPU: a handful of numbers."""
    values = [[math.nan if s.value is None else s.value for s in r.scores.values()] for r in rollouts]
    result = advantages(
        torch.tensor(values, dtype=torch.float32),
        settings.group_size,
        weights=torch.tensor(weights, dtype=torch.float32),
        kind=settings.advantage,
        combine=settings.combine,
    )
    for rollout, value in zip(rollouts, result.tolist(), strict=True):
        rollout.advantage = value


def groups_with_signal(rollouts: Sequence[Rollout], group_size: int) -> list[bool]:
    """Per group [P]: whether any advantage in it differs from 0."""
    return has_signal(torch.tensor([r.advantage for r in rollouts]), group_size).tolist()


def update(parts: StepParts, rollouts: Sequence[Rollout], lr: float) -> list[UpdateResult]:
    """`iterations_per_batch` optimizer updates on one batch of rollouts.

    Rows of groups without signal have a gradient of exactly 0 unless beta or the entropy bonus is positive, so they
    are left out of forward and backward; the denominator counts them as configured.
    """
    with ExitStack() as stack:
        if parts.packed:
            stack.enter_context(reading_packed_rows(*parts.models))
        if parts.compiled is not None:
            stack.enter_context(parts.compiled.switched_on())
        return _update(parts, rollouts, lr)


def _update(parts: StepParts, rollouts: Sequence[Rollout], lr: float) -> list[UpdateResult]:
    settings, clock, optimizer = parts.settings, parts.clock, parts.optimizer
    with clock.phase("logprobs"):
        signal = groups_with_signal(rollouts, settings.group_size)
        trained = [r for r in rollouts if settings.needs_every_group or signal[r.group]]
        counted = list(rollouts) if settings.count_all_groups else trained
        micro_batches = make_micro_batches(
            trained,
            packed=parts.packed,
            budget_tokens=settings.memory.micro_batch_tokens,
            whole_group_tokens=settings.memory.whole_group_tokens,
            pad_token_id=parts.policy.pad_token_id,
            mask_truncated=settings.mask_truncated,
            device=parts.policy.device,
        )
        denominator = count_denominator(
            [0 if settings.mask_truncated and r.truncated else len(r.completion.token_ids) for r in counted],
            micro_batches=len(micro_batches),
        )
        reference = [reference_logprobs(parts, batch) for batch in micro_batches]
    tokens = sum(batch.input_ids.numel() for batch in micro_batches)
    old: list[Tensor | None] = [None] * len(micro_batches)
    results = []
    for iteration in range(settings.iterations_per_batch):
        # After the first update of a batch the step can no longer be abandoned without a trace.
        with clock.phase("backward", interruptible=iteration == 0) as progress:
            optimizer.zero_grad()
            totals = Totals(parts.policy.device)
            for i, batch in enumerate(micro_batches):
                logprobs, entropy = policy_logprobs(parts, batch)
                output = policy_loss(
                    settings.loss, logprobs, old[i], batch.advantages, batch.completion_mask, denominator,
                    ref_logprobs=reference[i], entropy=entropy,
                )  # fmt: skip
                output.loss.backward()
                totals.add(output, sampler_gap(batch, logprobs.detach()), batch.completion_mask)
                if iteration == 0 and settings.iterations_per_batch > 1:
                    old[i] = logprobs.detach()  # the policy has not moved yet: no extra pass is needed
                progress(i + 1, len(micro_batches))
        with clock.phase("update", interruptible=iteration == 0):
            norm = optimizer.clip(settings.max_grad_norm)
            loss, grad_norm, metrics = totals.read(norm)
            changed = None
            if math.isfinite(loss) and math.isfinite(grad_norm):
                changed = read_back(optimizer.step(lr))[0] / max(optimizer.count_weights(), 1)
            results.append(UpdateResult(loss, grad_norm, len(trained), tokens, len(micro_batches), changed, metrics))
            if changed is None:
                optimizer.zero_grad()  # or they would stay through the next rollout
                break
    return results


def policy_logprobs(parts: StepParts, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy of the policy, [B, T] float32, 0 outside completions."""
    return _logprobs(parts.policy, batch, parts.settings)


@torch.no_grad()
def reference_logprobs(parts: StepParts, batch: MicroBatch) -> Tensor | None:
    """Logprobs of the reference, [B, T] float32; None without a KL term."""
    if parts.reference is None:
        return None
    return _logprobs(parts.reference, batch, parts.settings)[0]


def _logprobs(model: Policy, batch: MicroBatch, settings: StepSettings) -> tuple[Tensor, Tensor]:
    logprobs, entropy = token_logprobs(
        model.model,
        model.head,
        batch.input_ids,
        batch.position_ids,
        batch.predict_index,
        batch.target_ids,
        packing=None if batch.packing is None else Packing(batch.packing, batch.input_ids.device),
        temperature=settings.sampling.temperature,
        chunk_tokens=settings.memory.logprob_chunk_tokens,
        with_entropy=True,
        entropy_gradient=settings.loss.entropy_bonus > 0,
    )
    assert entropy is not None
    return batch.to_rows(logprobs), batch.to_rows(entropy)


def sampler_gap(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """|policy - sampler| logprob per completion token, [B, T] float32: how far rounding or a stale engine moved."""
    return (logprobs - batch.sampler_logprobs).abs() * batch.completion_mask


class Totals:
    """Sums over micro batches that stay on the device until they are read once."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._gap_max = torch.zeros((), device=device)
        self._sums: dict[str, Tensor] = {}

    def add(self, output: LossOutput, gap: Tensor, completion_mask: Tensor) -> None:
        """Add one micro batch; gap [B, T] as of `sampler_gap`."""
        self._loss = self._loss + output.loss.detach()
        self._gap_max = torch.maximum(self._gap_max, gap.max())
        for name, value in {**output.metrics, "gap": torch.stack([gap.sum(), completion_mask.sum()])}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self, norm: Tensor) -> tuple[float, float, dict[str, float]]:
        """Loss, gradient norm and mean metrics as plain numbers: the update's one read before the optimizer moves."""
        scalars = torch.stack([self._loss, norm.float(), self._gap_max])
        loss, grad_norm, gap_max, *sums = read_back(torch.cat([scalars, *self._sums.values()]))
        means = {name: sums[2 * i] / max(sums[2 * i + 1], 1.0) for i, name in enumerate(self._sums)}
        return loss, grad_norm, {**means, "gap_max": gap_max} if means else {}


def read_back(values: Tensor) -> list[float]:
    """The values of a tensor as plain numbers. A dry run replaces this one function."""
    return values.flatten().tolist()
