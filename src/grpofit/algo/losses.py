"""Policy losses: per-token term, reduction and denominator, one table row per algorithm.

Owns the formulas of every `algo.loss`, the KL and entropy terms, and how a step's loss is shared among micro batches.
Must not know configuration, models or how micro batches were made. `docs/papers.md` maps every option to its paper.

A step's loss is one number over all its rows. `policy_loss` returns the additive share of one micro batch, so the
sum over micro batches is that number, however the rows are split or ordered (`bnpo` alone depends on the split, by
definition). The denominators are counted once per optimizer step, on the host, before the first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio before exp: e^20 = 5e8 stays finite in float32 and its product with an advantage too, while
no ratio that clipping or a cap leaves in use comes near it. Beyond the bound the gradient is 0, not inf or NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Everything that decides the formula, as plain values (`auto` already resolved, see `Algorithm`).

    Attributes:
        loss: a key of `ALGORITHMS`.
        ratio: importance ratio per token, or one per sequence (GSPO).
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: the ratio is clipped at 1 + clip_high; for `cispo` it is the cap of the ratio itself.
        clip_delta: upper bound of the ratio on the branch that clipping leaves free; None: no bound.
        sapo_tau_pos, sapo_tau_neg: temperature of the gate where the advantage is positive, and elsewhere.
        beta: weight of the KL term to the reference.
        kl: estimator `k1`, `k2` or `k3`.
        entropy_bonus: weight of the entropy, subtracted from the loss.
        max_completion_tokens: the constant length of `dr_grpo`.
    """

    loss: str
    max_completion_tokens: int
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_delta: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    beta: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        assert self.loss in ALGORITHMS, f"loss {self.loss!r}: one of {', '.join(ALGORITHMS)}"
        assert self.ratio in ("token", "sequence"), f"ratio {self.ratio!r}: token or sequence"
        assert self.kl in _KL, f"kl {self.kl!r}: one of {', '.join(_KL)}"
        assert self.max_completion_tokens >= 1, "max_completion_tokens must be at least 1"


@dataclass(frozen=True, slots=True)
class Denominator:
    """What the step's loss is divided by, counted over the whole optimizer step.

    Attributes:
        rows: completions, fully masked ones included.
        tokens: completion tokens that enter the loss.
        micro_batches: calls of `policy_loss` that make up the step; only `bnpo` divides by it.
    """

    rows: float
    tokens: float
    micro_batches: int


def count_denominator(
    loss_tokens: Sequence[int], *, micro_batches: int, counted: Sequence[bool] | None = None
) -> Denominator:
    """Count the denominators of one optimizer step.

    Args:
        loss_tokens: per row of the step, its number of tokens in the loss (ones in its `completion_mask`); 0 for a
            row masked as a whole, which still counts as a row.
        micro_batches: in how many micro batches the step is computed.
        counted: per row, whether it counts at all (`algo.denominator: with_signal` leaves rows out); default all.
    """
    kept = loss_tokens if counted is None else [n for n, keep in zip(loss_tokens, counted, strict=True) if keep]
    return Denominator(rows=float(len(kept)), tokens=float(sum(kept)), micro_batches=micro_batches)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of `policy_loss`.

    Attributes:
        loss: scalar, this micro batch's additive share of the step's loss.
        metrics: name -> [2] float32 (sum, count), without gradient and on the loss's device. Add them over micro
            batches, then divide: shares are then exact. All count tokens in the loss. Keys: `ratio`; `kl_old` (k3
            estimate of KL(old, policy)); `clip_low`, `clip_high`, `clip_region`, `clip_delta` (share of tokens on
            which the bound acts); `kl` with a reference; `entropy` when given.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    spec: LossSpec,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    denominator: Denominator,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossOutput:
    """One micro batch's share of the step's loss: reduce(term + beta KL - entropy_bonus H) / denominator.

    KL and entropy are per-token terms and take the algorithm's own reduction, so the bonus is `entropy_bonus` times
    the entropy averaged as the loss is: over tokens (`dapo`), over sequences of their mean (`grpo`), and so on.

    Args:
        spec: which formula.
        logprobs: [B, T] of the policy, at the sampling temperature, with gradient.
        old_logprobs: [B, T] of the policy that the ratio compares with; None: on-policy, the ratio is 1 in value and
            exp(logprobs - stop_gradient(logprobs)) for the gradient.
        advantages: [B], or [B, T] for one per token.
        completion_mask: [B, T], nonzero on tokens in the loss. Elsewhere every other argument may hold anything, NaN
            included: it changes neither loss nor gradient.
        denominator: of the whole optimizer step.
        ref_logprobs: [B, T] of the reference; needed when beta > 0, otherwise only measured.
        entropy: [B, T] of the policy; needed, with gradient, when entropy_bonus > 0, otherwise only measured.

    Computed in float32 (float64 stays). Nothing is read back to the host and no argument is written to.
    """
    assert logprobs.shape == completion_mask.shape, f"{tuple(logprobs.shape)} != {tuple(completion_mask.shape)}"
    assert spec.beta == 0 or ref_logprobs is not None, f"beta {spec.beta} needs ref_logprobs"
    assert spec.entropy_bonus == 0 or entropy is not None, f"entropy_bonus {spec.entropy_bonus} needs entropy"
    # A bonus on entropies without gradient would be a silent no-op.
    assert spec.entropy_bonus == 0 or entropy is None or entropy.requires_grad or not logprobs.requires_grad, (
        f"entropy_bonus {spec.entropy_bonus} needs entropies that carry a gradient, as logprobs do"
    )
    algorithm = ALGORITHMS[spec.loss]
    mask = completion_mask != 0
    tokens = mask.sum(1)
    policy = _masked(logprobs, mask)
    old = policy.detach() if old_logprobs is None else _masked(old_logprobs, mask)
    weights = _masked(advantages.unsqueeze(1) if advantages.dim() == 1 else advantages, mask)
    log_ratio = policy - old
    if spec.ratio == "sequence":
        # GSPO, arXiv:2507.18071, Eq. 7: the geometric mean of the sequence's token ratios
        log_ratio = (log_ratio.sum(1) / tokens.clamp(min=1)).unsqueeze(1).expand_as(policy)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    term = algorithm.term(spec, ratio, policy, weights)
    measured = {"ratio": ratio, "kl_old": ratio - 1 - log_ratio, **algorithm.clipped(spec, ratio, weights)}
    if ref_logprobs is not None:
        measured["kl"] = _KL[spec.kl](_masked(ref_logprobs, mask) - policy)
        term = term + spec.beta * measured["kl"] if spec.beta else term
    if entropy is not None:
        measured["entropy"] = _masked(entropy, mask)
        term = term - spec.entropy_bonus * measured["entropy"] if spec.entropy_bonus else term

    loss = algorithm.reduce(torch.where(mask, term, 0.0), tokens) / algorithm.denominator(spec, denominator)
    return LossOutput(loss, {name: _sum_and_count(values, mask) for name, values in measured.items()})


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in float32 at least, 0 outside the mask.

    Before any arithmetic: 0 times inf or NaN in a backward would be NaN, where() passes no gradient at all.
    """
    return torch.where(mask, values.to(torch.promote_types(values.dtype, torch.float32)), 0.0)


def _sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, values.detach(), 0).sum(dtype=torch.float32)
    return torch.stack([kept, mask.sum(dtype=torch.float32)])


# Terms: (spec, ratio [B, T], logprobs [B, T], advantages [B, T]) -> [B, T], to be minimised.


def _surrogate(spec: LossSpec, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped surrogate, arXiv:1707.06347, Eq. 7; two bounds as in DAPO, arXiv:2503.14476, Eq. 8.

    `clip_delta` (INTELLECT-2, arXiv:2505.07291) bounds only the branch that clipping leaves free, which matters
    where the advantage is negative and the ratio large.
    """
    free = ratio if spec.clip_delta is None else ratio.clamp(max=spec.clip_delta)
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return -torch.minimum(free * advantages, clipped * advantages)


def _capped_reinforce(spec: LossSpec, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """CISPO, arXiv:2506.13585: every token keeps its gradient, weighted by a capped ratio without gradient."""
    return -ratio.detach().clamp(max=spec.clip_high) * advantages * logprobs


def _soft_gate(spec: LossSpec, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """SAPO, arXiv:2511.20347: a sigmoid of the ratio in place of the clip; value 2/tau and slope 1 at ratio 1."""
    positive = (advantages > 0).to(ratio.dtype)  # where() of two Python numbers would be float32 in float64, too
    tau = positive * spec.sapo_tau_pos + (1 - positive) * spec.sapo_tau_neg
    return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages


def _reinforce(spec: LossSpec, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE (Williams 1992): the score function, no ratio."""
    return -advantages * logprobs


# Where a bound acts: (spec, ratio [B, T], advantages [B, T]) -> name -> bool [B, T].


def _surrogate_clips(spec: LossSpec, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    low = (ratio < 1 - spec.clip_low) & (advantages < 0)
    high = (ratio > 1 + spec.clip_high) & (advantages > 0)
    acts = {"clip_low": low, "clip_high": high, "clip_region": low | high}
    if spec.clip_delta is not None:
        acts["clip_delta"] = (ratio > spec.clip_delta) & (advantages < 0)
    return acts


def _cap_clips(spec: LossSpec, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    return {"clip_high": (ratio > spec.clip_high) & (advantages != 0)}


def _no_clips(spec: LossSpec, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    return {}


# Reductions: (term [B, T], 0 outside the mask; tokens [B] in the loss per row) -> scalar numerator.


def _token_sum(term: Tensor, tokens: Tensor) -> Tensor:
    return term.sum()


def _sum_of_sequence_means(term: Tensor, tokens: Tensor) -> Tensor:
    return (term.sum(1) / tokens.clamp(min=1)).sum()


def _own_token_mean(term: Tensor, tokens: Tensor) -> Tensor:
    return term.sum() / tokens.sum().clamp(min=1)


# Denominators: a step without rows or tokens has loss 0, not 0 / 0.


def _by_tokens(spec: LossSpec, denominator: Denominator) -> float:
    return max(denominator.tokens, 1.0)


def _by_rows(spec: LossSpec, denominator: Denominator) -> float:
    return max(denominator.rows, 1.0)


def _by_rows_at_full_length(spec: LossSpec, denominator: Denominator) -> float:
    return max(denominator.rows, 1.0) * spec.max_completion_tokens


def _by_micro_batches(spec: LossSpec, denominator: Denominator) -> float:
    return max(denominator.micro_batches, 1)


# KL(policy, reference) per token from log_difference = ref_logprobs - logprobs [B, T]: Schulman, "Approximating KL
# divergence" (2020), http://joschu.net/blog/kl-approx.html


def _k1(log_difference: Tensor) -> Tensor:
    return -log_difference


def _k2(log_difference: Tensor) -> Tensor:
    return log_difference.square() / 2


def _k3(log_difference: Tensor) -> Tensor:
    """GRPO's own, arXiv:2402.03300, Eq. 4. Bounded above only: far below, exp is 0 and the rest must keep its pull."""
    bounded = log_difference.clamp(max=MAX_LOG_RATIO)
    return bounded.exp() - bounded - 1


_KL: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of `ALGORITHMS`: three choices, where its bounds act, and what `auto` stands for.

    Attributes:
        term: the per-token loss.
        reduce: from tokens to the micro batch's numerator.
        denominator: what the whole step's numerator is divided by.
        clipped: on which tokens a bound acts, for the metrics.
        ratio, clip_low, clip_high: the algorithm's own choice, used where the configuration says `auto`.
    """

    term: Callable[[LossSpec, Tensor, Tensor, Tensor], Tensor]
    reduce: Callable[[Tensor, Tensor], Tensor]
    denominator: Callable[[LossSpec, Denominator], float]
    clipped: Callable[[LossSpec, Tensor, Tensor], dict[str, Tensor]] = _surrogate_clips
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2


ALGORITHMS: dict[str, Algorithm] = {
    "dapo": Algorithm(_surrogate, _token_sum, _by_tokens),
    "grpo": Algorithm(_surrogate, _sum_of_sequence_means, _by_rows),
    "dr_grpo": Algorithm(_surrogate, _token_sum, _by_rows_at_full_length),
    "bnpo": Algorithm(_surrogate, _own_token_mean, _by_micro_batches),
    "gspo": Algorithm(_surrogate, _sum_of_sequence_means, _by_rows, ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Algorithm(_capped_reinforce, _token_sum, _by_tokens, _cap_clips, clip_high=5.0),
    "sapo": Algorithm(_soft_gate, _sum_of_sequence_means, _by_rows, _no_clips),
    "reinforce": Algorithm(_reinforce, _token_sum, _by_tokens, _no_clips),
}
