"""Users' reward functions: TRL's calling convention, what is accepted, what is refused and how it is said."""

from __future__ import annotations

import asyncio
import functools
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rollout_factory import make_rollout, make_rollouts

from grpofit.config.tree import RewardConfig
from grpofit.data.verify import RewardReport, RewardRunner, check_columns
from grpofit.errors import ConfigError, DataError, GrpofitError, RewardError
from grpofit.types import Reason, Rollout


def run_here(function, rollouts, *, columns=("answer",), max_error_frac=0.5, **keys) -> RewardReport:
    """Score with a function handed over in Python, which runs in this process."""
    reward = RewardConfig(function="score")
    with RewardRunner(
        [reward],
        base_dir=Path("."),
        max_completion_tokens=8,
        columns=columns,
        max_error_frac=max_error_frac,
        functions={"score": function},
    ) as runner:
        return runner.score(rollouts, **keys)


def file_runner(tmp_path: Path, source: str, **keys) -> RewardRunner:
    """A runner whose reward is `score` of a file with this source."""
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(source), encoding="utf-8")
    reward = RewardConfig(function="my_rewards.py:score", timeout_s=keys.pop("timeout_s", 5.0))
    defaults = {"base_dir": tmp_path, "max_completion_tokens": 8, "columns": ("answer",), "max_error_frac": 0.5}
    return RewardRunner([reward], **{**defaults, **keys})


def four_parts(error: GrpofitError) -> str:
    assert [label for label, _ in error.parts()] == ["got", "why", "fix"]
    return str(error)


def values(rollouts: list[Rollout]) -> list[float | None]:
    return [rollout.reward for rollout in rollouts]


class TestSignature:
    def test_everything_trl_passes(self):
        seen = {}

        def score(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
            seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids)
            seen["state"] = (trainer_state.global_step, trainer_state.max_steps)
            log_extra("length", [len(c) for c in completions])
            log_metric("mean", 3.0)
            log_metric("mean", 4.0)
            return [1.0, 0.0]

        rollouts = make_rollouts(["a", "bb"], answer="7", question="6 + 1")
        report = run_here(score, rollouts, columns=("question", "answer"), step=3, max_steps=9)
        assert seen == {
            "prompts": ["6 + 1", "6 + 1"],
            "completions": ["a", "bb"],
            "ids": [[0, 1, 2], [0, 1, 2]],
            "answer": ["7", "7"],
            "question": ["6 + 1", "6 + 1"],
            "state": (3, 9),
        }
        assert values(rollouts) == [1.0, 0.0]
        assert report.metrics == {"mean": 3.5}
        assert report.extra == {"length": [1, 2]}

    def test_without_kwargs_only_what_it_names(self):
        rollouts = make_rollouts(["a"], answer="7", other="x")
        run_here(lambda completions, answer: [float(answer[0])], rollouts, columns=("answer", "other"))
        assert values(rollouts) == [7.0]

    def test_an_optional_column_that_is_not_there(self):
        rollouts = make_rollouts(["a"])
        run_here(lambda completions, hint=None: [0.5 if hint is None else 0.0], rollouts, columns=())
        assert values(rollouts) == [0.5]

    def test_a_required_column_that_is_not_there(self):
        with pytest.raises(DataError) as caught:
            run_here(lambda completions, solution: [0.0], [], columns=("answer", "question"))
        assert 'needs the column "solution"' in four_parts(caught.value)
        assert "columns: answer, question" in str(caught.value)

    def test_strings_unless_the_data_set_has_messages(self):
        """As TRL: with messages in the data set, completions are messages too; else both are text."""
        seen = []

        def score(prompts, completions):
            seen.append((prompts[0], completions[0]))
            return [0.0]

        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        plain = make_rollout("c")
        templated = make_rollout("c")
        templated.prompt = replace(plain.prompt, messages=messages)
        conversational = make_rollout("c")
        conversational.prompt = replace(plain.prompt, messages=messages, conversational=True)
        for rollout in (plain, templated, conversational):
            run_here(score, [rollout])
        assert seen == [
            ("What is 1 + 1?", "c"),
            ("u", "c"),
            (messages, [{"role": "assistant", "content": "c"}]),
        ]

    def test_partial_and_callable_objects(self):
        class Scorer:
            def __call__(self, completions, **kwargs):
                return [2.0] * len(completions)

        def scaled(completions, scale, **kwargs):
            return [scale] * len(completions)

        rollouts = make_rollouts(["a", "b"])
        run_here(functools.partial(scaled, scale=3.0), rollouts)
        assert values(rollouts) == [3.0, 3.0]
        run_here(Scorer(), rollouts)
        assert values(rollouts) == [2.0, 2.0]

    def test_a_rewards_function_of_trl(self):
        rewards = pytest.importorskip("trl.rewards")
        rollouts = make_rollouts(["ab" * 9])
        run_here(rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2), rollouts)
        assert values(rollouts) == [-0.5]

    def test_async_keeps_one_event_loop(self):
        loops = []

        async def score(completions, **kwargs):
            await asyncio.sleep(0.01)
            loops.append(asyncio.get_running_loop())
            return [1.0] * len(completions)

        rollouts = make_rollouts(["a"])
        reward = RewardConfig(function="f")
        runner = RewardRunner(
            [reward],
            base_dir=Path("."),
            max_completion_tokens=8,
            columns=(),
            max_error_frac=0.0,
            functions={"f": functools.partial(score)},
        )

        async def in_a_notebook() -> None:  # where a loop is running already
            runner.score(rollouts)
            runner.score(rollouts)

        with runner:
            asyncio.run(in_a_notebook())
        assert values(rollouts) == [1.0]
        assert loops[0] is loops[1]


class TestValues:
    def test_none_is_left_out_of_the_sum(self):
        rollouts = make_rollouts(["12", "no"], answer="12")
        rewards = [
            RewardConfig(name="last_number", weight=2.0),
            RewardConfig(function="f", weight=0.5),
            RewardConfig(name="answer_format", weight=0.0),
        ]
        functions = {"f": lambda completions: [None, 3.0]}
        with RewardRunner(
            rewards,
            base_dir=Path("."),
            max_completion_tokens=8,
            columns=("answer",),
            max_error_frac=0.0,
            functions=functions,
        ) as runner:
            report = runner.score(rollouts)
            assert (runner.labels, runner.weights) == (["last_number", "f", "answer_format"], [2.0, 0.5, 0.0])
        assert [list(r.scores) for r in rollouts] == [runner.labels] * 2
        assert rollouts[0].scores["f"].reason is Reason.NOT_APPLICABLE
        assert values(rollouts) == [2.0, 1.5]
        assert report.reasons["f"] == {Reason.NOT_APPLICABLE: 1, Reason.SCORED: 1}

    def test_nothing_applies(self):
        rollouts = make_rollouts(["a", "b"])
        report = run_here(lambda completions: [None, None], rollouts)
        assert values(rollouts) == [None, None]
        assert report.unrewarded_rows == 2
        assert "2 of 2 completions got no value" in report.warnings[0]

    def test_numbers_of_other_kinds(self):
        torch = pytest.importorskip("torch")
        rollouts = make_rollouts(["a"] * 6)
        returned = [True, np.float32(0.5), np.int64(2), torch.tensor(0.25), np.bool_(False), 3]
        run_here(lambda completions: returned, rollouts)
        assert values(rollouts) == [1.0, 0.5, 2.0, 0.25, 0.0, 3.0]
        run_here(lambda completions: np.arange(6), rollouts)
        assert values(rollouts) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    @pytest.mark.parametrize(
        ("returned", "part"),
        [
            ([1.0], "returned 1 values for 2 completions"),
            ([1.0, 2.0, 3.0], "returned 3 values"),
            ("ab", "a str"),
            (None, "a NoneType"),
            (1.0, "a float"),
            ({"a": 1.0, "b": 2.0}, "a dict"),
            (["1.0", "2.0"], "a str"),
            ([[1.0], [2.0]], "a list"),
            ((x for x in (1.0, 2.0)), "a generator"),
            (np.zeros((2, 1)), "a list"),
            ([np.zeros(2), np.zeros(2)], "a ndarray"),
            ([1 + 2j, 0], "a complex"),
        ],
    )
    def test_unusable_results_stop_at_once(self, returned, part):
        rollouts = make_rollouts(["a", "b"])
        with pytest.raises(RewardError) as caught:
            run_here(lambda completions: returned, rollouts, max_error_frac=1.0)
        assert part in four_parts(caught.value)
        assert values(rollouts) == [None, None]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 10**400, np.float32("nan")])
    def test_a_number_that_is_not_finite_is_that_rows_error(self, bad):
        rollouts = make_rollouts(["a", "b", "c"])
        report = run_here(lambda completions: [1.0, bad, 0.0], rollouts)
        assert values(rollouts) == [1.0, None, 0.0]
        assert rollouts[1].scores["score"].reason is Reason.ERROR
        assert report.failing_rows == 1


class TestFailure:
    @staticmethod
    def picky(completions, **kwargs):
        if "bad" in completions:
            raise ValueError("cannot read bad")
        return [1.0] * len(completions)

    def test_only_the_guilty_rows_lose_their_score(self):
        rollouts = make_rollouts(["a", "bad", "b", "c"])
        report = run_here(self.picky, rollouts)
        assert values(rollouts) == [1.0, None, 1.0, 1.0]
        score = rollouts[1].scores["score"]
        assert score.reason is Reason.ERROR
        assert score.detail.startswith("ValueError: cannot read bad (test_user_functions.py:")
        assert report.failing_rows == 1
        assert any("called again for each completion alone" in warning for warning in report.warnings)

    def test_what_was_logged_when_called_again(self):
        def score(completions, log_extra, log_metric):
            log_extra("text", completions)
            log_metric("n", len(completions))
            return TestFailure.picky(completions)

        report = run_here(score, make_rollouts(["a", "bad", "b"]))
        assert report.extra == {"text": ["a", None, "b"]}
        assert report.metrics == {"n": 1.0}

    @pytest.mark.parametrize(("allowed", "stops"), [(0.0, True), (0.24, True), (0.25, False), (1.0, False)])
    def test_the_share_that_stops_the_run(self, allowed, stops):
        rollouts = make_rollouts(["a", "bad", "b", "c"])
        if not stops:
            assert run_here(self.picky, rollouts, max_error_frac=allowed).failing_rows == 1
            return
        with pytest.raises(RewardError) as caught:
            run_here(self.picky, rollouts, max_error_frac=allowed)
        text = four_parts(caught.value)
        assert 'the reward "score" failed on at least 1 of 4 completions' in text
        assert "What is 1 + 1?" in text
        assert "completion  bad" in text
        assert 'raise ValueError("cannot read bad")' in text
        assert "run.max_reward_error_frac" in text

    def test_sys_exit_is_an_error_of_the_function(self):
        def score(completions):
            raise SystemExit(0)

        rollouts = make_rollouts(["a", "b"])
        run_here(score, rollouts, max_error_frac=1.0)
        assert [r.scores["score"].detail[:12] for r in rollouts] == ["SystemExit: "] * 2

    def test_ctrl_c_is_not_an_error_of_the_function(self):
        def score(completions):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_here(score, make_rollouts(["a"]))


class TestFinding:
    def test_file_relative_to_the_configuration_with_its_neighbours(self, tmp_path):
        (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 4.0\n")
        rollouts = make_rollouts(["a"])
        with file_runner(
            tmp_path,
            """
            from dataclasses import dataclass
            from neighbour_of_rewards import VALUE

            @dataclass
            class Kept:
                value: float

            async def score(completions, **kwargs):
                return [Kept(VALUE).value] * len(completions)
            """,
        ) as runner:
            runner.score(rollouts)
        assert values(rollouts) == [4.0]

    def test_module_path(self, tmp_path):
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack" / "rewards.py").write_text("def score(completions): return [5.0] * len(completions)\n")
        rollouts = make_rollouts(["a"])
        reward = RewardConfig(function="pack.rewards:score")
        with RewardRunner(
            [reward], base_dir=tmp_path, max_completion_tokens=8, columns=(), max_error_frac=0.0
        ) as runner:
            runner.score(rollouts)
        assert values(rollouts) == [5.0]

    def test_a_file_may_be_called_like_a_module(self, tmp_path):
        (tmp_path / "random.py").write_text("def score(completions): return [1.0]\n")
        rollouts = make_rollouts(["a"])
        reward = RewardConfig(function="random.py:score")
        with RewardRunner(
            [reward], base_dir=tmp_path, max_completion_tokens=8, columns=(), max_error_frac=0.0
        ) as runner:
            runner.score(rollouts)
        assert values(rollouts) == [1.0]

    @pytest.mark.parametrize(
        ("function", "source", "part"),
        [
            ("nowhere.py:score", "", "there is no file"),
            ("my_rewards.py:scores", "def score(): pass", "it has: score"),
            ("my_rewards.py:score", "score = 3", 'has no function "score"'),
            ("my_rewards.py:score", "import not_installed", "No module named 'not_installed'"),
            ("my_rewards.py:score", "def score(:", "SyntaxError"),
            ("my_rewards.py:score", "raise SystemExit(3)", "SystemExit: 3"),
            ("my_rewards.py:score", "import os; os._exit(7)", "exit code 7"),
            ("no_such_module:score", "", "No module named 'no_such_module'"),
        ],
    )
    def test_what_cannot_be_loaded(self, tmp_path, function, source, part):
        (tmp_path / "my_rewards.py").write_text(source)
        with pytest.raises(ConfigError) as caught:
            RewardRunner(
                [RewardConfig(function=function)],
                base_dir=tmp_path,
                max_completion_tokens=8,
                columns=(),
                max_error_frac=0.0,
            )
        assert part in four_parts(caught.value)

    def test_a_function_that_no_reward_uses(self):
        with pytest.raises(ConfigError, match="no reward uses"):
            RewardRunner(
                [RewardConfig(name="answer_format")],
                base_dir=Path("."),
                max_completion_tokens=8,
                columns=(),
                max_error_frac=0.0,
                functions={"mine": len},
            )


def test_check_columns():
    check_columns([RewardConfig(name="last_number"), RewardConfig(function="a.py:f")], ["answer"])
    with pytest.raises(DataError) as caught:
        check_columns([RewardConfig(name="regex", pattern="a"), RewardConfig(name="math_answer")], ["solution"])
    text = four_parts(caught.value)
    assert "columns: solution" in text
    assert "--set 'task.answer=\"{{ solution }}\"'" in text
