"""A run that was stopped, in whatever way, ends as the undisturbed one: same bits, same records, nothing twice."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from run_factory import (
    HERE,
    assert_same_run,
    end,
    evaluations_of,
    final_digest,
    records_of,
    resume,
    small_letters,
    start,
    steps_of,
    tiny_config,
    train,
    wait_for,
    write_yaml,
)

from grpofit import api
from grpofit.cli import main
from grpofit.errors import CheckpointError, RewardError, RunError, StoppedError
from grpofit.training import loop, step


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    """4 steps, evaluated at 0, 2 and 4, saved at 2 and 4."""
    return train(config, out=tmp_path_factory.mktemp("undisturbed") / "run").run_dir


def interrupt_in(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """Ctrl-C arrives at the beginning of the `call`-th call of a function of the loop."""
    real, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    "owner, name, call, saved",
    [
        (loop, "evaluate_policy", 1, 0),  # the first evaluation
        (loop, "collect", 1, 0),
        (step, "set_advantages", 3, 2),
        (step, "policy_loss", 2, 1),
        (loop, "write_rollouts", 2, 2),  # the update is done, the evaluation after it is due
        (loop, "evaluate_policy", 2, 2),
        (loop, "save_checkpoint", 1, 2),
        (loop, "evaluate_policy", 3, 4),  # the last evaluation
        (loop, "write_rollouts", 4, 4),
    ],
)
def test_ctrl_c_at_any_place(config, undisturbed, tmp_path, monkeypatch, owner, name, call, saved):
    with monkeypatch.context() as patch:
        interrupt_in(patch, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            train(config, out=tmp_path / "run")
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == f"step-{saved:06d}"
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"stopped after step {saved}; go on with: grpofit train --resume {tmp_path / 'run'}" in log
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("name", ["save_policy", "plot_learning"])
def test_ctrl_c_when_all_is_done_finishes(config, undisturbed, tmp_path, monkeypatch, name):
    interrupt_in(monkeypatch, loop, name, 1)
    train(config, out=tmp_path / "run", curve=True)
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_second_ctrl_c_stops_without_saving(config, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_in(patch, step, "set_advantages", 3)
        interrupt_in(patch, loop, "collect", 3)
        with pytest.raises(KeyboardInterrupt):
            train(config, out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_ctrl_c_between_two_updates_of_one_batch(config, tmp_path, monkeypatch, call):
    two = {"algo.iterations_per_batch": 2, "run.steps": 2}
    whole = train(config, two, out=tmp_path / "whole").run_dir
    with monkeypatch.context() as patch:
        interrupt_in(patch, step, "policy_loss", call)
        with pytest.raises(KeyboardInterrupt):
            train(config, two, out=tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_ctrl_c_while_loading_leaves_nothing(config, tmp_path, monkeypatch):
    from grpofit.training import setup

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "load_policy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside(config, tmp_path, number, monkeypatch, capsys):
    """Also: while it runs, no other process may touch its directory; and the resume line it prints works."""
    steps = {"run": {**config["run"], "steps": 10_000, "eval_every": 0, "checkpoint_every": 0}}
    path = write_yaml(tmp_path, {**config, **steps})
    run_dir = tmp_path / "a run"
    process = start(["train", path.name, "--out", run_dir.name, "--plain"], tmp_path, tmp_path / "output")
    try:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(steps_of(run_dir)) >= 3, process)
        with pytest.raises(RunError, match="in use"):
            api.train(resume=run_dir)
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == 130
    finally:
        end(process)
    output = (tmp_path / "output").read_text()
    assert "Traceback" not in output
    stopped = steps_of(run_dir)[-1]
    assert stopped >= 3 and [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{stopped:06d}"]
    [line] = re.findall(r"stopped after step \d+; go on with: grpofit (.*)", output)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(line), "--set", f"run.steps={stopped + 2}"])
    assert not ended.value.code, capsys.readouterr().err
    whole = train(api.load(path), {"run.steps": stopped + 2}, out=tmp_path / "whole", rewards={})
    assert_same_run(run_dir, whole.run_dir)


def test_resuming_a_finished_run_changes_nothing(config, undisturbed, tmp_path):
    first = train(config, out=tmp_path / "run")
    again = resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)
    assert again.summary["wall_s"] >= first.summary["wall_s"] - 1
    assert "resumed after step 4" in (tmp_path / "run" / "train.log").read_text()


def test_more_steps_go_on_and_are_kept(config, tmp_path, monkeypatch):
    """Also when the longer run is stopped, and resumed by the line that it prints: that line names no steps."""
    whole = train(config, {"run.steps": 6}, out=tmp_path / "whole").run_dir
    train(config, out=tmp_path / "run")
    with monkeypatch.context() as patch:
        interrupt_in(patch, step, "set_advantages", 1)
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path / "run", {"run.steps": 6})
    assert resume(tmp_path / "run").summary["steps"] == 6
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_of_a_run_that_is_not_over_takes_its_newest_checkpoint(config, tmp_path, monkeypatch, dtype):
    """Also where `final/` is there, from before the run was given more steps."""
    run_dir = tmp_path / "run"
    train(config, {"run.steps": 2, "run.eval_every": 3, "model.dtype": dtype}, out=run_dir)
    with monkeypatch.context() as patch:
        interrupt_in(patch, step, "set_advantages", 2)
        with pytest.raises(KeyboardInterrupt):
            resume(run_dir, {"run.steps": 6})
    here, said = {HERE: small_letters}, []
    result = api.evaluate(run_dir, rewards=here, show=6)
    recorded = records_of(run_dir)[-1]
    assert recorded["step"] == 3 and {"step": 3, **result.metrics} == recorded
    stale = api.evaluate(run_dir, {"model.name": str(run_dir / "final")}, rewards=here, show=6)
    # What the overridden model says is not asked: a run that is not over is always read from its checkpoint.
    assert [r.completion.text for r in stale.samples] == [r.completion.text for r in result.samples]

    tensors = run_dir / "checkpoints" / "step-000003" / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    older = api.evaluate(run_dir, rewards=here, say=said.append)
    assert any("checkpoint step-000003 is broken" in line for line in said)
    assert {"step": 2, **older.metrics} == [record for record in records_of(run_dir) if record["step"] == 2][-1]


def test_evaluation_of_a_run_without_weights(config, tmp_path):
    train(config, {"run.steps": 1, "run.eval_every": 0}, out=tmp_path / "run")
    for name in ("final", "checkpoints"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(RunError, match="no weights yet") as raised:
        api.evaluate(tmp_path / "run", rewards={HERE: small_letters})
    assert raised.value.fix == f"grpofit train --resume {tmp_path / 'run'}"


def test_what_is_not_maths_may_change(config, undisturbed, tmp_path):
    train(config, {"run.steps": 2}, out=tmp_path / "run")
    changes = {"run.steps": 4, "run.eval_every": 1, "run.keep_last": 5, "run.trackers": ["tensorboard"]}
    resume(tmp_path / "run", changes)
    assert final_digest(tmp_path / "run") == final_digest(undisturbed)
    assert evaluations_of(tmp_path / "run") == [0, 2, 3, 4]


@pytest.mark.parametrize(
    "changes, key, old, new",
    [
        ({"optim.lr": 0.5}, "optim.lr", "0.01", "0.5"),
        ({"run.seed": 2}, "run.seed", "1", "2"),
        ({"rollout.group_size": 8}, "rollout.group_size", "4", "8"),
        ({"algo.loss": "dapo"}, "algo.loss", "grpo", "dapo"),
        ({"task.eval_size": 3}, "task.eval_size", "6", "3"),
    ],
)
def test_other_maths_are_refused(undisturbed, changes, key, old, new):
    before = {path.name: path.stat().st_mtime_ns for path in undisturbed.iterdir()}
    with pytest.raises(RunError) as raised:
        resume(undisturbed, changes)
    assert f"{key}: {old} -> {new}" in raised.value.values
    assert raised.value.why and f"--resume {undisturbed}" in raised.value.fix
    assert {path.name: path.stat().st_mtime_ns for path in undisturbed.iterdir()} == before


def test_more_steps_of_a_falling_schedule_are_other_maths(config, tmp_path):
    train(config, {"optim.schedule": "linear", "run.steps": 1, "run.eval_every": 0}, out=tmp_path / "run")
    with pytest.raises(RunError) as raised:
        resume(tmp_path / "run", {"run.steps": 4})
    assert "run.steps: 1 -> 4" in raised.value.values


def test_fewer_steps_than_are_finished(undisturbed):
    with pytest.raises(RunError, match="has finished more steps") as raised:
        resume(undisturbed, {"run.steps": 3})
    assert "finished: 4, run.steps: 3" in raised.value.values
    assert api.load(undisturbed / "config.yaml").config.run.steps == 4


def test_a_broken_newest_checkpoint_is_named_and_the_run_ends_the_same(config, undisturbed, tmp_path):
    train(config, {"run.steps": 3, "run.checkpoint_every": 1, "run.keep_last": 3}, out=tmp_path / "run")
    tensors = tmp_path / "run" / "checkpoints" / "step-000003" / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    resume(tmp_path / "run", {"run.steps": 4})
    texts = [json.loads(line)["text"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(text.startswith("checkpoint step-000003 is broken (") for text in texts)
    # The evaluation at 3 was the end of a shorter run; it is made again only where it is due.
    assert evaluations_of(tmp_path / "run") == [0, 2, 4] and steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert final_digest(tmp_path / "run") == final_digest(undisturbed)


def test_when_every_checkpoint_is_broken_nothing_is_touched(config, tmp_path):
    train(config, out=tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        path.write_text("")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_a_run_stopped_by_its_reward_goes_on_when_the_reward_is_mended(config, undisturbed, tmp_path):
    calls = []

    def failing(completions, **kwargs):
        calls.append(1)
        if len(calls) >= 5:  # evaluation, two steps, evaluation, then
            raise ZeroDivisionError("division by zero")
        return small_letters(completions)

    with pytest.raises(RewardError) as raised:
        train(config, {"run.checkpoint_every": 0}, out=tmp_path / "run", rewards={HERE: failing})
    assert raised.value.exit_code == 4
    assert f"then go on with: grpofit train --resume {tmp_path / 'run'}" in raised.value.fix
    assert steps_of(tmp_path / "run") == [1, 2]
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_line_of_metrics_that_a_kill_cut_off(config, undisturbed, tmp_path):
    train(config, {"run.steps": 2}, out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')
    (tmp_path / "run" / "rollouts" / "step-000003.parquet").write_bytes(b"PAR1 half")
    (tmp_path / "run" / "rollouts" / "step-000004.tmp").write_bytes(b"PAR1 half")
    resume(tmp_path / "run", {"run.steps": 4})
    assert_same_run(tmp_path / "run", undisturbed)


def test_another_version_of_a_package_is_said(config, tmp_path):
    train(config, {"run.steps": 1, "run.eval_every": 0}, out=tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    resume(tmp_path / "run")
    log = (tmp_path / "run" / "train.log").read_text()
    assert re.search(r"not the environment the run began in.*torch 1\.0 -> ", log)


@pytest.mark.parametrize("content", [{}, {"config.yaml": "model: {name: x}"}], ids=["empty", "a config of one's own"])
def test_what_is_no_run_directory(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match="is not a run directory") as raised:
        resume(tmp_path)
    assert "no config.yaml" in raised.value.values or "no environment.json" in raised.value.values


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB; a run of two steps takes about half of it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_stops_the_run_and_costs_no_more_than_the_steps_since_the_checkpoint(
    config, undisturbed, small_disk
):
    run_dir, calls = small_disk / "run", []

    def filling(completions, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # in step 3
            with (small_disk / "filler").open("wb") as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(4096))
                    file.flush()
        return small_letters(completions)

    with pytest.raises(StoppedError) as raised:
        train(config, out=run_dir, rewards={HERE: filling})
    error = raised.value
    assert error.exit_code == 4 and "free" in error.fix and f"--resume {run_dir}" in error.fix and error.why
    assert "No space left" in error.values
    (small_disk / "filler").unlink()
    resume(run_dir)
    assert_same_run(run_dir, undisturbed)
