"""What accuracy means: hand-computed intervals, correctness under several rewards, pass@k."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.data.verify import RewardReport
from grpofit.training.evaluate import Evaluation, evaluate_policy, is_correct, wilson_interval
from grpofit.types import Completion, FinishReason, Prompt, Reason, Rollout, RolloutKey, Sampling, Score


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        # z^2 = 3.8414588. 0 of 10: the interval is [0, z^2 / (n + z^2)]; 10 of 10 is its mirror.
        (0, 10, 0.0, 3.8414588 / 13.8414588),
        (10, 10, 10 / 13.8414588, 1.0),
        # 1 of 2: 1/2 -+ z / 2 / sqrt(n + z^2) = 1/2 -+ 1.959964 / 2 / 2.416911
        (1, 2, 0.0945312, 0.9054688),
        # 78 of 200: centre (0.39 + 0.0096036) / 1.0192073 = 0.3920730,
        # half width 1.9599640 sqrt(0.2379 / 200 + 3.8414588 / 160000) / 1.0192073 = 0.0669896
        (78, 200, 0.3250834, 0.4590626),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=2e-7)


@given(st.integers(1, 500), st.data())
@settings(max_examples=50)
def test_wilson_interval_holds_the_share_and_narrows(n, data):
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n + 1e-12 and successes / n - 1e-12 <= high <= 1
    narrower = wilson_interval(4 * successes, 4 * n)
    assert narrower[1] - narrower[0] < high - low
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def rollout(*reasons: Reason) -> Rollout:
    completion = Completion((1,), (0.0,), FinishReason.STOP, "x")
    scores = {str(i): Score(0.0, reason) for i, reason in enumerate(reasons)}
    return Rollout(Prompt(0, "p", "p", (1,), {}), completion, 0, 0, scores)


@pytest.mark.parametrize(
    "reasons, expected",
    [
        ((Reason.CORRECT,), True),
        ((Reason.WRONG,), False),
        ((Reason.NO_ANSWER,), False),
        ((Reason.TRUNCATED,), False),
        ((Reason.SCORED,), False),  # no reward knows correct
        ((), False),
        ((Reason.CORRECT, Reason.SCORED), True),  # a format or length reward has no say
        ((Reason.SCORED, Reason.CORRECT), True),
        ((Reason.CORRECT, Reason.NOT_APPLICABLE), True),
        ((Reason.CORRECT, Reason.CORRECT), True),
        ((Reason.CORRECT, Reason.WRONG), False),  # all that judge must agree
        ((Reason.TRUNCATED, Reason.CORRECT), False),
        ((Reason.TIMEOUT,), False),
        ((Reason.ERROR,), False),
        ((Reason.CORRECT, Reason.ERROR), True),
    ],
)
def test_is_correct(reasons, expected):
    assert is_correct(rollout(*reasons)) is expected


class ScriptedEngine:
    """Writes what a table says for (row_id, sample), greedy as sample -1; notes how it was asked."""

    def __init__(self, texts: dict[tuple[int, int], str]) -> None:
        self._texts = texts
        self.keys: list[RolloutKey] = []
        self.temperatures: list[float] = []

    def generate(self, prompts, keys, sampling, progress=None):
        self.keys += keys
        self.temperatures.append(sampling.temperature)
        samples = [-1 if sampling.temperature == 0 else key.sample for key in keys]
        texts = [self._texts.get((p.row_id, sample), "wrong") for p, sample in zip(prompts, samples, strict=True)]
        finish = [FinishReason.LENGTH if text == "long" else FinishReason.STOP for text in texts]
        return [
            Completion((1,) * len(text), (0.0,) * len(text), f, text) for text, f in zip(texts, finish, strict=True)
        ]


class Table:
    """A reward by the completion's text."""

    def __init__(self, table: dict[str, Score]) -> None:
        self._table = table

    def score(self, rollouts, *, step=0, max_steps=0):
        for item in rollouts:
            item.scores = {"table": self._table[item.completion.text]}
            item.reward = item.scores["table"].value
        return RewardReport({}, 0, 0)


JUDGED = Table(
    {
        "right": Score(1.0, Reason.CORRECT),
        "wrong": Score(0.0, Reason.WRONG),
        "long": Score(0.0, Reason.TRUNCATED),
        "failed": Score(None, Reason.ERROR),
    }
)
PROMPTS = [Prompt(row_id, f"p{row_id}", f"p{row_id}", (1,), {}) for row_id in (3, 5, 8, 9)]
SAMPLING = Sampling(max_completion_tokens=8, temperature=0.7)


def evaluate(engine, rewards=JUDGED, k=0) -> Evaluation:
    return evaluate_policy(engine, rewards, PROMPTS, SAMPLING, seed=11, k=k)


def test_greedy_accuracy_by_hand():
    engine = ScriptedEngine({(3, -1): "right", (5, -1): "wrong", (8, -1): "long", (9, -1): "right"})
    result = evaluate(engine)
    assert (result.n, result.accuracy, result.reward, result.score) == (4, 0.5, 0.5, 0.5)
    assert result.interval == wilson_interval(2, 4)
    assert result.mean_length_tokens == (5 + 5 + 4 + 5) / 4
    assert result.truncated_frac == 0.25
    assert result.pass_at_k is None
    assert [r.completion.text for r in result.rollouts] == ["right", "wrong", "long", "right"]
    assert engine.temperatures == [0.0]
    assert result.record() == {
        "eval/n": 4,
        "eval/reward": 0.5,
        "eval/mean_length": 4.75,
        "eval/clipped_ratio": 0.25,
        "eval/accuracy": 0.5,
        "eval/accuracy_low": wilson_interval(2, 4)[0],
        "eval/accuracy_high": wilson_interval(2, 4)[1],
    }


def test_pass_at_k_counts_prompts_with_a_correct_sample():
    engine = ScriptedEngine(
        {
            **{(3, sample): "right" for sample in range(3)},  # all three
            (5, 2): "right",  # the last one
            (8, 0): "right",  # the first one
            **{(9, sample): "wrong" for sample in range(3)},
            (9, -1): "right",  # greedy does not count for pass@k
        }
    )
    result = evaluate(engine, k=3)
    assert (result.accuracy, result.k, result.pass_at_k) == (0.25, 3, 0.75)
    assert result.record()["eval/pass_at_3"] == 0.75
    assert engine.temperatures == [0.0, 0.7]
    sampled = engine.keys[4:]
    assert [(key.row_id, key.sample) for key in sampled] == [(row, s) for row in (3, 5, 8, 9) for s in range(3)]


def test_pass_at_1_is_one_sample_not_greedy():
    engine = ScriptedEngine({(3, -1): "right", (5, 0): "right", (8, 0): "right"})
    result = evaluate(engine, k=1)
    assert (result.accuracy, result.pass_at_k) == (0.25, 0.5)


def test_draws_are_named_by_the_seed_and_never_those_of_a_training_step():
    engine = ScriptedEngine({})
    evaluate(engine, k=2)
    assert {key.seed for key in engine.keys} == {11}
    assert min(key.step for key in engine.keys) >= 2**31
    assert len(set(engine.keys[4:])) == 8  # no two samples share a draw


def test_where_no_reward_knows_correct_there_is_no_accuracy():
    scored = Table({text: Score(len(text) / 10, Reason.SCORED) for text in ("right", "wrong", "long")})
    result = evaluate(ScriptedEngine({(3, -1): "long"}), scored, k=2)
    assert (result.accuracy, result.interval) == (None, None)
    assert result.reward == pytest.approx((0.4 + 3 * 0.5) / 4)
    assert result.score == result.reward
    record = result.record()
    assert "eval/reward" in record and not any(key.startswith("eval/accuracy") for key in record)
    assert "eval/pass_at_2" not in record  # a share of what nobody judges would be a 0 that means nothing


def test_rewards_that_failed_stay_out_of_the_mean_and_count_as_not_correct():
    result = evaluate(ScriptedEngine({(3, -1): "failed", (5, -1): "right"}))
    assert result.accuracy == 0.25  # of 4, one right: a failed one is not taken out of the count
    assert result.reward == pytest.approx(1 / 3)


def test_no_reward_at_all():
    nothing = Table({"wrong": Score(None, Reason.NOT_APPLICABLE)})
    result = evaluate(ScriptedEngine({}), nothing)
    assert result.accuracy is None and result.score == 0.0
    assert not math.isnan(result.reward)
