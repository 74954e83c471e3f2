"""Which completions share a row: budgets, split groups, nothing lost."""

from __future__ import annotations

import pytest
import torch
from families import random_prompt, random_rollout
from hypothesis import given
from hypothesis import strategies as st

from grpofit.data.batching import make_micro_batches, pack_groups, split_rows
from grpofit.types import FinishReason, PackedGroup

CPU = torch.device("cpu")


def pack(groups: list[tuple[int, list[int]]], budget_tokens: int | None, whole: int = 0) -> list[list[list[int]]]:
    prompts = [prompt for prompt, lengths in groups for _ in lengths]
    lengths = [length for _, lengths in groups for length in lengths]
    members = [group for group, (_, lengths) in enumerate(groups) for _ in lengths]
    return pack_groups(prompts, lengths, members, budget_tokens, whole)


def test_groups_share_rows_up_to_the_budget() -> None:
    # 5 + 6 = 11, 5 + 4 = 9, 3 + 2 = 5 tokens: longest first, each into the first row with room
    groups = [(3, [1, 1]), (5, [3, 3]), (5, [2, 2])]
    assert pack(groups, 16) == [[[2, 3], [0, 1]], [[4, 5]]]
    assert pack(groups, None) == [[[2, 3], [4, 5], [0, 1]]]


def test_a_group_over_the_budget_is_split_with_its_prompt_repeated() -> None:
    assert pack([(10, [5, 1, 5, 1])], 20) == [[[0, 2]], [[1, 3]]]
    assert pack([(10, [5, 1, 5, 1])], 20, whole=22) == [[[0, 2, 1, 3]]]


def test_the_smallest_unit_is_a_completion_with_its_prompt() -> None:
    assert pack([(10, [7, 7]), (2, [1])], 1) == [[[0]], [[1]], [[2]]]


@given(
    groups=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), max_size=6),
    budget=st.none() | st.integers(1, 40),
    whole=st.integers(0, 30),
)
def test_any_groups(groups: list[tuple[int, list[int]]], budget: int | None, whole: int) -> None:
    rows = pack(groups, budget, whole)
    prompts = [prompt for prompt, lengths in groups for _ in lengths]
    lengths = [length for _, lengths in groups for length in lengths]
    members = [group for group, (_, lengths) in enumerate(groups) for _ in lengths]
    assert sorted(i for row in rows for piece in row for i in piece) == list(range(len(lengths)))
    sizes = []
    for row in rows:
        assert all(len({members[i] for i in piece}) == 1 for piece in row)
        sizes.append(sum(prompts[piece[0]] + sum(lengths[i] for i in piece) for piece in row))
        alone = len(row) == 1 and (len(row[0]) == 1 or sizes[-1] <= whole)
        assert alone or budget is None or sizes[-1] <= budget
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("budget, rows", [(20, [[0, 2], [1]]), (None, [[0, 2, 1]]), (5, [[0], [2], [1]])])
def test_plain_rows_are_padded_to_the_longest_of_a_micro_batch(budget: int | None, rows: list[list[int]]) -> None:
    assert split_rows([10, 3, 8], budget) == rows


def test_a_packed_row_by_hand() -> None:
    first, second = random_prompt(0, 2), random_prompt(1, 1)
    a, b, c = (
        random_rollout(prompt, group, sample, length, FinishReason.STOP)
        for prompt, group, sample, length in ((first, 0, 0, 3), (first, 0, 1, 1), (second, 1, 0, 2))
    )
    a.advantage, b.advantage, c.advantage = 1.0, -1.0, 0.5
    (batch,) = make_micro_batches(
        [a, b, c], packed=True, budget_tokens=None, pad_token_id=0, mask_truncated=False, device=CPU
    )
    # The last token of a completion predicts nothing and is left out; b has no other.
    one, two = first.token_ids
    assert batch.input_ids.tolist() == [[one, two, *a.completion.token_ids[:2], *second.token_ids,
                                         c.completion.token_ids[0]]]  # fmt: skip
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.packing == (PackedGroup(0, 2, (2,)), PackedGroup(4, 1, (1,)))
    assert batch.rows == (0, 1, 2) and batch.advantages.tolist() == [1.0, -1.0, 0.5]
    # The prompt's last token predicts the first of both completions.
    assert batch.predict_index.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.target_ids.tolist() == [*a.completion.token_ids, *b.completion.token_ids, *c.completion.token_ids]
    assert batch.to_rows(torch.arange(1.0, 7.0)).tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert batch.completion_mask.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
