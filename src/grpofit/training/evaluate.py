"""Evaluation on held-out prompts: greedy accuracy with a Wilson interval, pass@k from samples.

Owns what "accuracy" means. Must not change the policy, nor know when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpofit.data.verify import RewardRunner
from grpofit.rollout.base import Engine
from grpofit.types import Prompt, Reason, Rollout, RolloutKey, Sampling

_JUDGED = frozenset({Reason.CORRECT, Reason.WRONG, Reason.NO_ANSWER, Reason.TRUNCATED})
# Outside the steps of any training run, so that evaluation draws never coincide with training draws.
_EVAL_STEP = 2**31
_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result on `n` held-out prompts.

    Attributes:
        accuracy: share of greedy completions that a reward calls correct; None where no reward knows correct.
        interval: 95% Wilson interval of `accuracy`.
        reward: mean reward of the greedy completions.
        pass_at_k: share of prompts with a correct one among k samples; None if not asked for, or not known as above.
        rollouts: the greedy completions, scored.
    """

    n: int
    accuracy: float | None
    interval: tuple[float, float] | None
    reward: float
    mean_length_tokens: float
    truncated_frac: float
    k: int
    pass_at_k: float | None
    rollouts: Sequence[Rollout]

    @property
    def score(self) -> float:
        """Accuracy, or the mean reward where no reward knows correct."""
        return self.reward if self.accuracy is None else self.accuracy

    def record(self) -> dict[str, float]:
        """The keys of the metrics record."""
        record: dict[str, float] = {
            "eval/n": self.n,
            "eval/reward": self.reward,
            "eval/mean_length": self.mean_length_tokens,
            "eval/clipped_ratio": self.truncated_frac,
        }
        if self.accuracy is not None and self.interval is not None:
            record["eval/accuracy"] = self.accuracy
            record["eval/accuracy_low"], record["eval/accuracy_high"] = self.interval
        if self.pass_at_k is not None:
            record[f"eval/pass_at_{self.k}"] = self.pass_at_k
        return record


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95% interval of a share (Wilson, 1927); unlike the normal one it never leaves [0, 1]."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    scale = 1 + _Z95**2 / n
    centre = (share + _Z95**2 / (2 * n)) / scale
    half = _Z95 * math.sqrt(share * (1 - share) / n + _Z95**2 / (4 * n**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def is_correct(rollout: Rollout) -> bool:
    """Whether every reward that judges correctness calls it correct, and at least one does."""
    judged = [s.reason for s in rollout.scores.values() if s.reason in _JUDGED]
    return bool(judged) and all(reason is Reason.CORRECT for reason in judged)


def _judged(rollouts: Sequence[Rollout]) -> bool:
    return any(score.reason in _JUDGED for rollout in rollouts for score in rollout.scores.values())


def evaluate_policy(
    engine: Engine,
    rewards: RewardRunner,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    seed: int,
    k: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Greedy completions of `prompts`, and k samples of each at `sampling` if k > 0."""
    rows = _score(engine, rewards, prompts, replace(sampling, temperature=0.0), seed, 1, progress)
    judged = _judged(rows)
    correct = sum(map(is_correct, rows))
    pass_at_k = None
    if k > 0:
        samples = _score(engine, rewards, prompts, sampling, seed, k, progress)
        solved = {r.group for r in samples if is_correct(r)}
        pass_at_k = len(solved) / len(prompts) if _judged(samples) else None
    valued = [r.reward for r in rows if r.reward is not None]
    return Evaluation(
        n=len(rows),
        accuracy=correct / len(rows) if judged else None,
        interval=wilson_interval(correct, len(rows)) if judged else None,
        reward=sum(valued) / len(valued) if valued else 0.0,
        mean_length_tokens=sum(len(r.completion.token_ids) for r in rows) / len(rows),
        truncated_frac=sum(r.truncated for r in rows) / len(rows),
        k=k,
        pass_at_k=pass_at_k,
        rollouts=rows,
    )


def _score(
    engine: Engine,
    rewards: RewardRunner,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
    samples: int,
    progress: Callable[[int, int], None] | None,
) -> list[Rollout]:
    rows = [prompt for prompt in prompts for _ in range(samples)]
    keys = [RolloutKey(seed, _EVAL_STEP, p.row_id, i % samples) for i, p in enumerate(rows)]
    completions = engine.generate(rows, keys, sampling, progress)
    rollouts = [
        Rollout(prompt, completion, group=i // samples, sample=i % samples)
        for i, (prompt, completion) in enumerate(zip(rows, completions, strict=True))
    ]
    rewards.score(rollouts)
    return rollouts
