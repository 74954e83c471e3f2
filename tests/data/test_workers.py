"""What a hostile completion or a broken function can do to a run: nothing but lose its own score."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from rollout_factory import make_rollout, make_rollouts
from test_user_functions import file_runner, four_parts, values

from grpofit.config.tree import RewardConfig
from grpofit.data.process import Job, Pool, WorkerProcess, run_jobs
from grpofit.data.verify import RewardRunner
from grpofit.errors import DataError, RewardError
from grpofit.types import Reason

MIB = 1024**2


def builtin_runner(*rewards: RewardConfig, **keys) -> RewardRunner:
    defaults = {"base_dir": Path("."), "max_completion_tokens": 8, "columns": ("answer",), "max_error_frac": 0.0}
    return RewardRunner(rewards, **{**defaults, **keys})


def worker_pid(runner: RewardRunner) -> int:
    pools = [runner._pool, *runner._function_pools.values()]
    return next(worker.pid for pool in pools for worker in pool.workers)


def gone(pid: int, within_s: float = 3.0) -> bool:
    """Whether the process ends in time (a zombie has ended)."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


class TestBuiltins:
    def test_a_pattern_that_never_ends(self):
        """Exponential backtracking, which holds Python's lock: no thread could interrupt it."""
        rollouts = make_rollouts(["aaa", "a" * 60 + "b", "aa"])
        with builtin_runner(RewardConfig(name="regex", pattern="^(a+)+$", timeout_s=0.3)) as runner:
            first = worker_pid(runner)
            start = time.monotonic()
            report = runner.score(rollouts)
            assert time.monotonic() - start < 3
            assert gone(first)
            assert values(rollouts) == [1.0, None, 1.0]
            assert rollouts[1].scores["regex"].reason is Reason.TIMEOUT
            assert rollouts[1].scores["regex"].detail == "no answer in 0.3 s"
            assert report.failing_rows == 0  # the completion's doing, not the reward's
            assert "1 of 3 completions were too much" in report.warnings[0]
            again = make_rollouts(["a", "b"])
            runner.score(again)
        assert values(again) == [1.0, 0.0]

    def test_a_tower_of_powers(self):
        texts = ["\\boxed{7}", "\\boxed{10^{10^{10}}}", "10**10**10", "\\boxed{8}"]
        rollouts = make_rollouts(texts, answer="7")
        with builtin_runner(RewardConfig(name="math_answer", timeout_s=0.7)) as runner:
            runner.score(rollouts)
        assert [r.scores["math_answer"].reason for r in rollouts] == [
            Reason.CORRECT,
            Reason.TIMEOUT,
            Reason.TIMEOUT,
            Reason.WRONG,
        ]

    def test_deep_nesting(self):
        rollouts = make_rollouts(["\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", "\\boxed{7}"], answer="7")
        with builtin_runner(RewardConfig(name="math_answer", timeout_s=0.7)) as runner:
            runner.score(rollouts)
        assert rollouts[0].scores["math_answer"].reason in (Reason.WRONG, Reason.NO_ANSWER, Reason.TIMEOUT)
        assert rollouts[1].scores["math_answer"].reason is Reason.CORRECT

    def test_over_the_memory_limit(self):
        """Backtracking over ten million characters keeps a state for each."""
        spec = {"name": "regex", "pattern": "(?:(a)|b)*c"}
        setup = {"kind": "builtins", "rewards": [spec], "memory_bytes": 200 * MIB}
        replies = []

        def done(outcome):
            replies.append(outcome.reply)
            return ()

        worker = WorkerProcess(setup, output_fd=2, environment={})
        pool = Pool([worker])
        pool.queue.extend(Job((0, text, 1, False, {}), 20.0, done) for text in ("a" * 10_000_000, "ac"))
        run_jobs([pool])
        worker.kill()
        assert replies[0] == {"limit": "memory"}
        assert replies[1]["value"] == 1.0

    def test_an_unusable_reference_is_an_error_not_a_wrong_answer(self):
        rollouts = [make_rollout("12", answer="12"), make_rollout("12", row=1, answer="blue")]
        with builtin_runner(RewardConfig(name="last_number"), max_error_frac=0.5) as runner:
            report = runner.score(rollouts)
        assert rollouts[1].scores["last_number"].reason is Reason.ERROR
        assert report.failing_rows == 1
        with builtin_runner(RewardConfig(name="last_number"), max_error_frac=0.4) as runner:
            with pytest.raises(RewardError, match="holds no number") as caught:
                runner.score(rollouts)
            four_parts(caught.value)
            runner.score(rollouts[:1])  # the runner is still usable

    def test_truncation_and_length_reach_the_rewards(self):
        rollouts = [make_rollout("11", answer="12", tokens=8, truncated=True)]
        rewards = (RewardConfig(name="last_number"), RewardConfig(name="soft_overlong", buffer_tokens=4))
        with builtin_runner(*rewards) as runner:
            runner.score(rollouts)
        assert rollouts[0].scores["last_number"].reason is Reason.TRUNCATED
        assert rollouts[0].reward == -1.0

    def test_several_workers_give_the_same_scores(self):
        texts = [str(n) for n in range(40)]
        for workers in (1, 3):
            rollouts = make_rollouts(texts, answer="7")
            with builtin_runner(RewardConfig(name="last_number"), workers=workers) as runner:
                runner.score(rollouts)
            assert values(rollouts) == [float(n == 7) for n in range(40)]

    def test_nothing_to_score(self):
        with builtin_runner(RewardConfig(name="last_number")) as runner:
            assert runner.score([]).reasons == {"last_number": {}}

    def test_a_lone_surrogate(self):
        rollouts = make_rollouts(["\ud83d 12"], answer="12")
        with builtin_runner(RewardConfig(name="last_number")) as runner:
            runner.score(rollouts)
        assert values(rollouts) == [1.0]

    def test_small_and_fast(self):
        start = time.monotonic()
        with builtin_runner(RewardConfig(name="last_number")) as runner:
            assert time.monotonic() - start < 1.0  # about 0.1 s on an idle machine
            process = psutil.Process(worker_pid(runner))
            assert process.memory_info().rss < 40 * MIB
            loaded = {Path(m.path).name for m in process.memory_maps()}
        assert not any("torch" in name or "sympy" in name or "numpy" in name for name in loaded)


class TestFunctions:
    """A function that is hostile to the process it runs in, on some of its rows."""

    def score(self, tmp_path, body: str, texts=("a", "bad", "b"), **keys):
        source = f"""
            import os, sys, time, subprocess
            def score(completions, **kwargs):
                for text in completions:
                    if text == "bad":
                        {body}
                return [1.0] * len(completions)
            """
        rollouts = make_rollouts(texts)
        with file_runner(tmp_path, source, **keys) as runner:
            report = runner.score(rollouts)
        return rollouts, report

    @pytest.mark.parametrize(
        ("body", "part"),
        [
            ("os._exit(3)", "exit code 3"),
            ("os._exit(0)", "exit code 0"),
            ("sys.exit(2)", "SystemExit: 2"),
            ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
            ("(f := lambda n: f(n + 1))(0)", "RecursionError"),
            ("sys.setrecursionlimit(10**9); (f := lambda n: sorted([n], key=f))(0)", "its process ended"),
            ("bytearray(10**13)", "MemoryError"),
        ],
    )
    def test_only_its_own_row(self, tmp_path, body, part):
        rollouts, report = self.score(tmp_path, body)
        assert values(rollouts) == [1.0, None, 1.0]
        assert rollouts[1].scores["score"].reason is Reason.ERROR
        assert part in rollouts[1].scores["score"].detail
        assert report.failing_rows == 1

    def test_memory_without_bound(self, tmp_path):
        body = "held = [bytearray(16 * 1024**2) for _ in iter(int, 1)]"
        rollouts, _ = self.score(tmp_path, body, function_memory_bytes=256 * MIB)
        assert values(rollouts) == [1.0, None, 1.0]
        assert "MemoryError" in rollouts[1].scores["score"].detail

    def test_a_loop_without_end(self, tmp_path):
        rollouts, report = self.score(tmp_path, "while True: pass", timeout_s=0.2)
        assert values(rollouts) == [1.0, None, 1.0]
        assert rollouts[1].scores["score"].reason is Reason.TIMEOUT
        assert report.failing_rows == 1
        assert "no answer in 0.6 s" in report.warnings[0]  # the batch of three

    def test_its_children_end_with_it(self, tmp_path):
        file = str(tmp_path / "pid")
        body = f"p = subprocess.Popen(['sleep', '600']); print(p.pid, file=open({file!r}, 'w')); p.wait()"
        self.score(tmp_path, body, timeout_s=0.3)
        assert gone(int((tmp_path / "pid").read_text()))

    def test_every_row_fails(self, tmp_path):
        """Stops at the first row that is too many, and does not start a process for each of a thousand."""
        start = time.monotonic()
        with pytest.raises(RewardError, match="failed on at least 1 of 1000"):
            self.score(tmp_path, "os._exit(1)", texts=["bad"] * 1000, max_error_frac=0.0)
        assert time.monotonic() - start < 5

    def test_prints_go_to_the_log_and_stdin_is_empty(self, tmp_path):
        source = """
            import sys
            def score(completions, **kwargs):
                print("read", repr(sys.stdin.read()))
                return [1.0] * len(completions)
            """
        rollouts = make_rollouts(["a"])
        with file_runner(tmp_path, source, log=tmp_path / "rewards.log") as runner:
            runner.score(rollouts)
        assert values(rollouts) == [1.0]
        assert (tmp_path / "rewards.log").read_text() == "read ''\n"

    def test_large_batches_in_both_directions(self, tmp_path):
        """More than the pipes hold at once."""
        source = "def score(completions, log_extra): log_extra('text', completions); return [1.0] * len(completions)"
        rollouts = make_rollouts(["x" * 1_000_000] * 8)
        with file_runner(tmp_path, source) as runner:
            report = runner.score(rollouts)
        assert report.extra["text"] == ["x" * 1_000_000] * 8

    def test_a_column_that_cannot_be_sent(self, tmp_path):
        rollouts = make_rollouts(["a"], answer=threading.Lock())
        with (
            file_runner(tmp_path, "def score(completions, **kwargs): return [1.0]") as runner,
            pytest.raises(DataError) as caught,
        ):
            runner.score(rollouts)
        assert "cannot pickle" in four_parts(caught.value)
        with file_runner(tmp_path, "def score(completions): return [1.0]") as runner:
            runner.score(rollouts)
        assert values(rollouts) == [1.0]

    def test_state_is_kept_between_steps(self, tmp_path):
        source = """
            calls = []
            def score(completions, **kwargs):
                calls.append(1)
                return [float(len(calls))] * len(completions)
            """
        rollouts = make_rollouts(["a"])
        with file_runner(tmp_path, source) as runner:
            runner.score(rollouts)
            runner.score(rollouts)
        assert values(rollouts) == [2.0]


class TestLifetime:
    def test_ctrl_c_is_the_parents_business(self, tmp_path):
        rollouts = make_rollouts(["a"])
        with file_runner(tmp_path, "def score(completions): return [1.0]") as runner:
            pid = worker_pid(runner)
            assert os.getpgid(pid) != os.getpgid(0)  # the terminal's Ctrl-C goes to our group only
            os.kill(pid, signal.SIGINT)
            runner.score(rollouts)
            assert worker_pid(runner) == pid
        assert values(rollouts) == [1.0]

    def test_a_worker_that_died_between_steps_is_replaced(self, tmp_path):
        rollouts = make_rollouts(["a"])
        with file_runner(tmp_path, "def score(completions): return [1.0] * len(completions)") as runner:
            pid = worker_pid(runner)
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
            report = runner.score(rollouts)
        assert values(rollouts) == [1.0]
        assert (report.failing_rows, report.warnings) == (0, [])

    def test_close_ends_them_and_may_be_called_twice(self, tmp_path):
        runner = file_runner(tmp_path, "def score(completions): return [1.0]")
        pid = worker_pid(runner)
        runner.close()
        runner.close()
        assert gone(pid)

    @pytest.mark.parametrize("doing", ["while True: pass", "import time; time.sleep(600)"])
    def test_no_orphans_when_the_parent_is_killed(self, tmp_path, doing):
        """Killed in the middle of a step: a worker that spins or sleeps ends too."""
        source = "import os\ndef score(completions):\n  print(os.getpid(), file=open({!r}, 'w'))\n  {}\n"
        (tmp_path / "hang.py").write_text(source.format(str(tmp_path / "pid"), doing))
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_PARENT), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )
        until = time.monotonic() + 20
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(pid)
        parent.kill()
        parent.wait()
        assert gone(pid)

    def test_replies_are_plain_json(self, tmp_path):
        """What comes back is parsed, never unpickled: an object of the function arrives as text."""
        source = """
            class Trap:
                def __reduce__(self):
                    import os
                    return (os._exit, (9,))
            def score(completions, log_extra):
                log_extra("trap", [Trap() for _ in completions])
                return [1.0] * len(completions)
            """
        with file_runner(tmp_path, source) as runner:
            report = runner.score(make_rollouts(["a"]))
        assert json.dumps(report.extra).startswith('{"trap": ["<grpofit_reward_my_rewards.Trap object')


_PARENT = """
    import sys
    from pathlib import Path
    from rollout_factory import make_rollouts
    from grpofit.config.tree import RewardConfig
    from grpofit.data.verify import RewardRunner

    reward = RewardConfig(function="hang.py:score", timeout_s=600)
    runner = RewardRunner(
        [reward], base_dir=Path(sys.argv[1]), max_completion_tokens=8, columns=(), max_error_frac=0.0
    )
    runner.score(make_rollouts(["a"]))
"""
