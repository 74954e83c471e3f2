"""Advantages by hand, their edge cases by name, and the properties every kind must have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.algo.advantages import advantages, combine_rewards, has_signal

NAN = float("nan")
KINDS = ["group", "batch", "none", "leave_one_out"]


def near(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=tolerance, atol=tolerance)


def test_group_by_hand() -> None:
    # rewards 0, 0, 3, 5: mean 2, squared deviations 4 + 4 + 1 + 9 = 18, std (ddof 1) sqrt(6)
    std = math.sqrt(6) + 1e-4
    near(advantages(torch.tensor([0.0, 0, 3, 5]), 4), [-2 / std, -2 / std, 1 / std, 3 / std])


def test_batch_by_hand() -> None:
    # groups (0, 2) and (6, 12): centred on 1 and 9; all rows: mean 5, squares 25 + 9 + 1 + 49 = 84, std sqrt(28)
    std = math.sqrt(28) + 1e-4
    near(advantages(torch.tensor([0.0, 2, 6, 12]), 2, kind="batch"), [-1 / std, 1 / std, -3 / std, 3 / std])


def test_none_by_hand() -> None:
    near(advantages(torch.tensor([0.0, 2, 6, 12]), 2, kind="none"), [-1, 1, -3, 3])


def test_leave_one_out_by_hand() -> None:
    # the others' means: of (2, 5) 3.5, of (-1, 5) 2, of (-1, 2) 0.5
    near(advantages(torch.tensor([-1.0, 2, 5]), 3, kind="leave_one_out"), [-4.5, 0, 4.5])


def test_weighted_sum_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    weights = torch.tensor([2.0, 0.25])
    near(combine_rewards(rewards, weights), [2, 1])
    near(advantages(rewards, 2, weights=weights, kind="none"), [0.5, -0.5])


def test_normalize_each_by_hand() -> None:
    # Column 0 in groups (0, 1) and (1, 1); column 1 in groups (0, 0) and (0, 100). Each informative pair becomes
    # -c, +c with c = 0.5 / (sqrt(0.5) + eps) or 50 / (100 sqrt(0.5) + eps); equal pairs become 0.
    rewards = torch.tensor([[0.0, 0], [1, 0], [1, 0], [1, 100]])
    c0 = 0.5 / (math.sqrt(0.5) + 1e-4)
    c1 = 50 / (100 * math.sqrt(0.5) + 1e-4)
    sums = [-c0, c0, -2 * c1, 2 * c1]  # weights 1 and 2
    std = math.sqrt(sum(s * s for s in sums) / 3) + 1e-4
    actual = advantages(rewards, 2, weights=torch.tensor([1.0, 2.0]), combine="normalize_each")
    near(actual, [s / std for s in sums])


def test_normalize_each_keeps_what_a_sum_cancels() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert not has_signal(advantages(rewards, 3), 3).any()
    assert advantages(rewards, 3).tolist() == [0, 0, 0]
    weights = torch.tensor([1.0, 0.5])
    assert has_signal(advantages(rewards, 3, weights=weights, combine="normalize_each"), 3).tolist() == [True]
    assert advantages(rewards, 3, weights=weights, combine="normalize_each")[0] > 0


def test_a_function_that_does_not_apply_is_left_out_of_the_row() -> None:
    near(combine_rewards(torch.tensor([[1.0, NAN], [2.0, 3.0], [NAN, 4.0]])), [1, 5, 4])


def test_rows_without_any_reward_get_zero_and_stay_out_of_mean_and_std() -> None:
    rewards = torch.tensor([[NAN, NAN], [1.0, NAN], [3.0, 2.0]])
    assert combine_rewards(rewards).isnan().tolist() == [True, False, False]
    std = math.sqrt(8) + 1e-4  # of 1 and 5
    near(advantages(rewards, 3), [0, -2 / std, 2 / std])
    near(advantages(rewards, 3, kind="leave_one_out"), [0, -4, 4])
    near(advantages(rewards, 3, kind="batch"), [0, -2 / std, 2 / std])


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_with_one_reward_gets_zero(kind: str) -> None:
    rewards = torch.tensor([NAN, 7.0, NAN, 0.0, 1.0, 2.0])
    actual = advantages(rewards, 3, kind=kind)
    assert actual[:3].tolist() == [0, 0, 0]
    assert actual[3] < 0 < actual[5]
    assert has_signal(advantages(rewards, 3), 3).tolist() == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_no_reward_at_all_gives_zeros(kind: str) -> None:
    rewards = torch.full((4, 2), NAN)
    assert advantages(rewards, 2, kind=kind).tolist() == [0] * 4
    assert has_signal(advantages(rewards, 2), 2).tolist() == [False, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7, 1e6, 0.0])
@pytest.mark.parametrize("group_size", [3, 7])
def test_equal_rewards_give_exactly_zero(kind: str, value: float, group_size: int) -> None:
    rewards = torch.cat([torch.full((group_size,), value), torch.arange(group_size)])
    actual = advantages(rewards, group_size, kind=kind)
    assert actual[:group_size].tolist() == [0] * group_size
    assert actual[-1] > 0


def test_the_residue_of_a_weighted_sum_is_no_signal() -> None:
    # The same total in real numbers, not in float32.
    rewards = torch.tensor([[1.1, -1.0], [0.1, 0.0], [0.6, -0.5]])
    assert combine_rewards(rewards).unique().numel() > 1
    assert has_signal(advantages(rewards, 3), 3).tolist() == [False]
    for kind in KINDS:
        assert advantages(rewards, 3, kind=kind).tolist() == [0, 0, 0]


def test_the_residue_of_one_reward_function_is_not_normalised_into_a_score() -> None:
    rewards = torch.tensor([[0.1, 5.0], [0.1, 5.0], [0.1, 5.0]])
    rewards[1, 0] = torch.nextafter(rewards[1, 0], torch.tensor(1.0))
    assert not has_signal(advantages(rewards, 3, combine="normalize_each"), 3).any()
    assert advantages(rewards, 3, combine="normalize_each").tolist() == [0, 0, 0]


def test_one_differing_completion_is_signal_for_every_kind() -> None:
    # nemo#3469: a leave-one-out std would be 0 for exactly this completion
    rewards = torch.tensor([0.0, 0, 0, 1])
    assert has_signal(advantages(rewards, 4), 4).tolist() == [True]
    for kind in KINDS:
        actual = advantages(rewards, 4, kind=kind)
        assert actual[3] > 0.7 and actual[0] < 0


def test_a_small_but_real_spread_is_signal() -> None:
    rewards = torch.tensor([0.5, 0.5, 0.50001])
    assert has_signal(advantages(rewards, 3), 3).tolist() == [True]
    assert advantages(rewards, 3)[2] > 0


@settings(max_examples=25, deadline=None)
@given(
    data=st.lists(st.one_of(st.floats(-10, 10, width=32), st.just(NAN)), min_size=12, max_size=12),
    kind=st.sampled_from([*KINDS, "normalize_each"]),
)
def test_properties_of_every_kind(data: list[float], kind: str) -> None:
    rewards = torch.tensor(data).view(6, 2)
    rewards[:3] *= 100  # groups of different scale
    before = rewards.clone()
    options = {"combine": "normalize_each"} if kind == "normalize_each" else {"kind": kind}
    actual = advantages(rewards, 3, **options)
    torch.testing.assert_close(rewards, before, equal_nan=True, rtol=0, atol=0)
    assert actual.isfinite().all()
    # groups are centred; no reward, no advantage; no signal, exactly none
    assert actual.view(2, 3).sum(1).abs().max() < 1e-4 * (1 + actual.abs().max())
    assert (actual[rewards.isnan().all(1)] == 0).all()
    combine = options.get("combine", "sum")
    assert ((actual.view(2, 3) != 0).any(1) == has_signal(advantages(rewards, 3, combine=combine), 3)).all()
    # groups may come in any order
    swapped = advantages(torch.cat([rewards[3:], rewards[:3]]), 3, **options)
    torch.testing.assert_close(swapped, torch.cat([actual[3:], actual[:3]]), rtol=1e-4, atol=1e-5)


def test_contradictions_and_broken_groups_are_refused() -> None:
    with pytest.raises(AssertionError, match="not whole groups of 3"):
        advantages(torch.zeros(4), 3)
    with pytest.raises(AssertionError, match="normalize_each fixes the scaling"):
        advantages(torch.zeros(4, 2), 2, kind="none", combine="normalize_each")
    with pytest.raises(AssertionError, match="kind 'std'"):
        advantages(torch.zeros(4), 2, kind="std")
    with pytest.raises(AssertionError, match="weights"):
        advantages(torch.zeros(4, 2), 2, weights=torch.ones(3))


def test_runs_on_meta() -> None:
    rewards = torch.empty(6, 2, device="meta")
    for options in [{"kind": kind} for kind in KINDS] + [{"combine": "normalize_each"}]:
        assert advantages(rewards, 3, **options).shape == (6,)
    assert has_signal(advantages(rewards, 3), 3).shape == (2,)
