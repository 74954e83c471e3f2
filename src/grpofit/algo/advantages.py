"""Advantages: what each completion's reward says, compared with the other completions of its prompt.

Owns how rewards are combined, centred and scaled, and which groups carry a signal. Must not know where rewards come
from nor which loss uses the result. `docs/papers.md` maps every option to its paper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SPREAD_TOLERANCE = 1e-6
"""Rewards of a group that differ by less than this count as equal; above 1 in size, relative to the largest.
Float32 keeps 6e-8 relative: a weighted sum of equal scores leaves a residue below this, which division by a near-zero
standard deviation would turn into an advantage."""


def combine_rewards(rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted sum over reward functions, leaving out those that do not apply.

    Args:
        rewards: [B, K] one column per reward function, NaN where it does not apply or failed; or [B].
        weights: [K], default all 1.

    Returns:
        [B] float32: sum_k w_k r_ik over the functions that gave a value; NaN where none did.
    """
    table = rewards.to(torch.float32).reshape(rewards.shape[0], -1)
    factors = table.new_ones(table.shape[1]) if weights is None else weights.to(table)
    assert factors.shape == table.shape[1:], f"weights {tuple(factors.shape)} for rewards {tuple(rewards.shape)}"
    missing = table.isnan()
    total = (table.masked_fill(missing, 0.0) * factors).sum(1)
    return total.masked_fill(missing.all(1), torch.nan)


def advantages(
    rewards: Tensor,
    group_size: int,
    *,
    weights: Tensor | None = None,
    kind: str = "group",
    combine: str = "sum",
    eps: float = 1e-4,
) -> Tensor:
    """Advantage of every completion; a constant for the gradient.

    With R_i the weighted sum of row i's rewards, mean and std (ddof 1) over the rows that have one:

    - `group` (GRPO, arXiv:2402.03300, section 4.1.2): (R_i - mean_group) / (std_group + eps)
    - `batch` (arXiv:2508.08221): (R_i - mean_group) / (std over all B rows + eps)
    - `none` (Dr. GRPO, arXiv:2503.20783): R_i - mean_group
    - `leave_one_out` (RLOO, arXiv:2402.14740): R_i - mean of the other completions of the group

    `combine="normalize_each"` (GDPO, arXiv:2601.05242) normalises every reward function in its group first, sums with
    the weights, then normalises over all B rows; it fixes the scaling itself, so `kind` must be `group`.

    Args:
        rewards: [B] or [B, K] (one column per reward function), groups contiguous, NaN where a function does not
            apply or failed.
        group_size: G; B is a multiple of it.
        weights: [K] factors of the reward functions, default all 1.
        kind: centring and scaling, see above.
        combine: `sum` or `normalize_each`.
        eps: added to a standard deviation before dividing.

    Returns:
        [B] float32. Exactly 0 in a group whose rewards are equal (within `SPREAD_TOLERANCE`) or that has one reward
        only, and on rows without any reward; those rows stay out of every mean and std.
    """
    assert kind in _KINDS, f"kind {kind!r}: one of {', '.join(_KINDS)}"
    assert combine == "sum" or kind == "group", f"normalize_each fixes the scaling itself; kind {kind!r} contradicts"
    scores = _scores(rewards, group_size, weights, combine, eps)
    scaled = _over_batch(scores, eps) if combine == "normalize_each" else _KINDS[kind](scores, eps)
    informative = _differs(scores, dim=1) & ~scores.isnan()
    return torch.where(informative, scaled, 0.0).reshape(-1)


def has_signal(advantages: Tensor, group_size: int) -> Tensor:
    """Which groups move the policy: those with an advantage other than 0. advantages [B] -> [P] bool."""
    return advantages.view(-1, group_size).ne(0).any(1)


def _scores(rewards: Tensor, group_size: int, weights: Tensor | None, combine: str, eps: float) -> Tensor:
    """[P, G] combined rewards, NaN where a row has none."""
    assert combine in ("sum", "normalize_each"), f"combine {combine!r}: sum or normalize_each"
    assert group_size >= 1 and rewards.shape[0] % group_size == 0, (
        f"{rewards.shape[0]} rewards are not whole groups of {group_size}"
    )
    if combine == "normalize_each":
        grouped = rewards.to(torch.float32).reshape(-1, group_size, rewards[0].numel())
        normalised = _by_group(grouped, eps)
        # Where all completions score alike, a residue of rounding must not become a score.
        normalised = torch.where(grouped.isnan() | _differs(grouped, dim=1), normalised, 0.0)
        rewards = normalised.reshape(rewards.shape)
    return combine_rewards(rewards, weights).reshape(-1, group_size)


def _moments(values: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std (ddof 1; 0 below two values) and count along `dim` (kept), NaN left out."""
    missing = values.isnan()
    count = (~missing).sum(dim, keepdim=True)
    mean = values.masked_fill(missing, 0.0).sum(dim, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).masked_fill(missing, 0.0).square().sum(dim, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt(), count


def _differs(values: Tensor, dim: int) -> Tensor:
    """Whether the values along `dim` (kept) differ by more than the tolerance, NaN left out."""
    missing = values.isnan()
    highest = values.masked_fill(missing, -torch.inf).amax(dim, keepdim=True)
    lowest = values.masked_fill(missing, torch.inf).amin(dim, keepdim=True)
    size = values.masked_fill(missing, 0.0).abs().amax(dim, keepdim=True)
    return highest - lowest > SPREAD_TOLERANCE * size.clamp(min=1.0)


def _by_group(scores: Tensor, eps: float) -> Tensor:
    mean, std, _ = _moments(scores, dim=1)
    return (scores - mean) / (std + eps)


def _by_batch(scores: Tensor, eps: float) -> Tensor:
    return _centred(scores, eps) / (_moments(scores, dim=(0, 1))[1] + eps)


def _centred(scores: Tensor, eps: float) -> Tensor:
    return scores - _moments(scores, dim=1)[0]


def _leave_one_out(scores: Tensor, eps: float) -> Tensor:
    # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
    mean, _, count = _moments(scores, dim=1)
    return (scores - mean) * count / (count - 1).clamp(min=1)


def _over_batch(scores: Tensor, eps: float) -> Tensor:
    mean, std, _ = _moments(scores, dim=(0, 1))
    return (scores - mean) / (std + eps)


_KINDS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "group": _by_group,
    "batch": _by_batch,
    "none": _centred,
    "leave_one_out": _leave_one_out,
}
