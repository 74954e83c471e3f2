"""Drawing tokens: keyed uniforms, the inverse CDF against a plain loop, truncation by hand, frequencies."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpofit.rollout.sampling import keyed_uniforms, sample_tokens
from grpofit.types import RolloutKey, Sampling

PLAIN = Sampling(max_completion_tokens=1)
LARGEST_UNIFORM = 1 - 2**-53
KEY = RolloutKey(seed=1, step=2, row_id=3, sample=4)
# The first block of the search ends after 128 tokens.
VOCAB_SIZES = [1, 5, 127, 128, 129, 300, 1000]


def naive(weights: list[float], uniform: float) -> int:
    """First token whose cumulative weight exceeds uniform x total, in float64."""
    target, reached = uniform * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > target:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def draw(logits: Tensor, uniforms: list[float] | Tensor, sampling: Sampling = PLAIN) -> tuple[Tensor, Tensor]:
    """The same logits [V] for every uniform."""
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    return sample_tokens(logits.expand(len(uniforms), -1), uniforms, sampling)


def grid(count: int = 1000) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


# keyed_uniforms


def test_uniforms_depend_on_the_key_alone() -> None:
    keys = [dataclasses.replace(KEY, row_id=row, sample=sample) for row in range(3) for sample in range(4)]
    together = keyed_uniforms(keys, 20)
    assert together.shape == (12, 20) and together.dtype == torch.float64
    assert torch.equal(keyed_uniforms(keys[::-1], 20), together.flip(0))
    for i, key in enumerate(keys):
        assert torch.equal(keyed_uniforms([key], 20)[0], together[i])
    assert torch.equal(keyed_uniforms(keys, 7), together[:, :7])
    assert torch.equal(keyed_uniforms([KEY, KEY], 5)[0], keyed_uniforms([KEY, KEY], 5)[1])


def test_every_part_of_the_key_matters() -> None:
    keys = [dataclasses.replace(KEY, **{name: 99}) for name in ("seed", "step", "row_id", "sample")]
    drawn = keyed_uniforms([KEY, *keys], 8)
    assert len({tuple(row) for row in drawn.tolist()}) == 5


def test_uniforms_are_uniform() -> None:
    drawn = keyed_uniforms([dataclasses.replace(KEY, sample=s) for s in range(200)], 50)
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = torch.histc(drawn, bins=10, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.1%
    # The first draws of neighbouring keys are as independent as the draws of one key.
    first = drawn[:, 0] - 0.5
    assert abs((first[1:] * first[:-1]).mean() * 12) < 4 / math.sqrt(199)


def test_no_rows() -> None:
    assert keyed_uniforms([], 5).shape == (0, 5)


# sample_tokens without truncation


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_inverse_cdf_equals_a_plain_loop(vocab_size: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 40
    logits = 4 * torch.randn(rows, vocab_size, generator=generator)
    logits[torch.rand(rows, vocab_size, generator=generator) < 0.3] = -torch.inf
    logits[:, vocab_size // 2] = 0.5
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
    before = logits.clone()
    ids, logprobs = sample_tokens(logits, uniforms, Sampling(1, temperature=temperature))
    assert torch.equal(logits, before)
    assert ids.dtype == torch.int64 and logprobs.dtype == torch.float32
    weights = (logits / temperature).double().softmax(-1)
    assert ids.tolist() == [naive(w, u) for w, u in zip(weights.tolist(), uniforms.tolist(), strict=True)]
    expected = weights.log().gather(-1, ids[:, None])[:, 0].float()
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equal_weights_are_hit_exactly(vocab_size: int) -> None:
    # Weights of 0 and 1 add up without rounding, so the extreme uniforms have one right answer.
    generator = torch.Generator().manual_seed(vocab_size)
    allowed = torch.rand(vocab_size, generator=generator) < 0.4
    allowed[vocab_size // 2] = True
    logits = torch.where(allowed, 0.0, -torch.inf)
    support = allowed.nonzero()[:, 0].tolist()
    ends = [(i + 1) / len(support) for i in range(len(support) - 1)]
    uniforms = [0.0, LARGEST_UNIFORM, *ends, *grid(100).tolist()]
    ids, logprobs = draw(logits, uniforms)
    assert ids[:2].tolist() == [support[0], support[-1]]
    assert ids.tolist() == [naive(allowed.double().tolist(), u) for u in uniforms]
    torch.testing.assert_close(logprobs, torch.full((len(uniforms),), -math.log(len(support))))


@pytest.mark.parametrize("token", [0, 127, 128, 299])
@pytest.mark.parametrize("rest", [-torch.inf, -1e4])
def test_one_possible_token(token: int, rest: float) -> None:
    logits = torch.full((300,), rest)
    logits[token] = 3.0
    ids, logprobs = draw(logits, [0.0, 0.5, LARGEST_UNIFORM])
    assert ids.tolist() == [token] * 3
    assert logprobs.tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    low, full = draw(logits, grid(50)), draw(logits.float(), grid(50))
    assert torch.equal(low[0], full[0]) and torch.equal(low[1], full[1])


@pytest.mark.parametrize(("vocab_size", "critical"), [(7, 22.46), (200, 266.4)])
def test_frequencies_match_the_softmax(vocab_size: int, critical: float) -> None:
    # critical: chi-square at 0.1% with vocab_size - 1 degrees of freedom
    count = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    ids, _ = draw(logits, keyed_uniforms([KEY], count)[0], Sampling(1, temperature=1.5))
    expected = count * (logits.double() / 1.5).softmax(-1)
    assert expected.min() > 5
    observed = torch.bincount(ids, minlength=vocab_size)
    assert ((observed - expected) ** 2 / expected).sum() < critical


# Truncation: probabilities 0.1, 0.4, 0.2, 0.3 for the tokens 0, 1, 2, 3

LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("options", "probabilities"),
    [
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 9}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.41}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.69}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.71}, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        ({"top_p": 1e-6}, {1: 1.0}),
        # top_k first: 4/9, 3/9, 2/9 are left; the first two hold 0.78
        ({"top_k": 3, "top_p": 0.75}, {1: 4 / 7, 3: 3 / 7}),
        # temperature first: 1, 16, 4, 9 of 30; the first holds 0.53
        ({"temperature": 0.5, "top_p": 0.55}, {1: 16 / 25, 3: 9 / 25}),
        ({"temperature": 0.5, "top_p": 0.5}, {1: 1.0}),
    ],
)
def test_truncation_by_hand(options: dict[str, float], probabilities: dict[int, float]) -> None:
    ids, logprobs = draw(LOGITS, grid(), Sampling(1, **options))
    assert set(ids.tolist()) == set(probabilities)
    for token, probability in probabilities.items():
        drawn = ids == token
        assert abs(drawn.double().mean() - probability) < 2e-3
        torch.testing.assert_close(logprobs[drawn], torch.full((int(drawn.sum()),), math.log(probability)))


def test_truncation_looks_at_each_row_alone() -> None:
    rows = torch.stack([LOGITS, LOGITS.flip(0), torch.zeros(4)])
    ids, logprobs = sample_tokens(rows, torch.full((3,), LARGEST_UNIFORM), Sampling(1, top_k=2))
    assert ids.tolist() == [3, 2, 3]
    # Equal logits: none of the tied tokens is more likely than another, so all stay.
    torch.testing.assert_close(logprobs, torch.tensor([3 / 7, 4 / 7, 1 / 4]).log())


def test_greedy_takes_the_most_likely_whatever_the_uniform() -> None:
    ids, logprobs = draw(LOGITS, [0.0, LARGEST_UNIFORM], Sampling(1, temperature=0.0, top_k=3, top_p=0.5))
    assert ids.tolist() == [1, 1]
    torch.testing.assert_close(logprobs, torch.full((2,), math.log(0.4)))


finite = st.floats(-1e4, 1e4, width=32)
unit = st.one_of(st.sampled_from([0.0, 2**-60, LARGEST_UNIFORM]), st.floats(0, 1, exclude_max=True))


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.one_of(finite, st.just(-math.inf)), min_size=1, max_size=260).filter(
        lambda x: max(x) > -math.inf
    ),
    uniform=unit,
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_k=st.integers(0, 5),
    top_p=st.sampled_from([1.0, 0.9, 0.01]),
)
def test_drawn_token_is_always_possible(
    logits: list[float], uniform: float, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    ids, logprobs = draw(torch.tensor(logits), [uniform], sampling)
    assert logits[int(ids)] > -math.inf
    assert -1e6 < float(logprobs) <= 1e-6
