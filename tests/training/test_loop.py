"""Undisturbed runs of the training loop on a tiny model: what they write, what their options do."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from run_factory import (
    HERE,
    evaluations_of,
    final_digest,
    records_of,
    small_letters,
    steps_of,
    tiny_config,
    train,
    weights_of,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpofit import api
from grpofit.errors import ConfigError, NonFiniteError, RunError, UserError
from grpofit.training import loop
from grpofit.training.records import read_metrics
from grpofit.training.rundir import default_run_dir


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain_run(config, tmp_path_factory) -> api.RunResult:
    """4 steps, seed 1, evaluated at 0, 2 and 4."""
    return train(config, out=tmp_path_factory.mktemp("plain") / "run", curve=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def training_records(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if "step_time" in record]


def test_files_of_a_run(plain_run):
    assert names_in(plain_run.run_dir) == [  # no events.jsonl: nothing happened that is an event
        ".lock", "checkpoints", "config.yaml", "curve.png", "environment.json", "final", "metrics.jsonl", "rollouts",
        "summary.json", "train.log",
    ]  # fmt: skip
    assert names_in(plain_run.run_dir / "rollouts") == [f"step-00000{step}.parquet" for step in (1, 2, 3, 4)]
    assert names_in(plain_run.run_dir / "checkpoints") == ["step-000002", "step-000004"]
    assert (plain_run.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    log = (plain_run.run_dir / "train.log").read_text()
    for text in ("device: CPU, 1 thread", "step 4/4", "checkpoint after step 4", "trained   4 of 4 steps"):
        assert text in log


def test_summary(plain_run):
    summary = json.loads((plain_run.run_dir / "summary.json").read_text())
    assert summary == plain_run.summary == api.read_summary(plain_run.run_dir)
    promised = "accuracy_start accuracy_end eval_n steps wall_s step_s_median peak_rss_bytes seed"
    assert set(promised.split()) <= summary.keys()
    assert (summary["steps"], summary["seed"], summary["eval_n"]) == (4, 1, 6)
    times = [record["step_time"] for record in training_records(plain_run.run_dir)]
    assert summary["step_s_median"] == pytest.approx((sorted(times)[1] + sorted(times)[2]) / 2)
    assert summary["wall_s"] > sum(times)
    assert 50 * 2**20 < summary["peak_rss_bytes"] < 8 * 2**30
    assert summary["accuracy_end"] is None  # this reward does not judge


def test_records(plain_run):
    assert steps_of(plain_run.run_dir) == [1, 2, 3, 4]
    assert evaluations_of(plain_run.run_dir) == [0, 2, 4]
    for record in read_metrics(plain_run.run_dir / "metrics.jsonl"):
        assert all(value is None or not isinstance(value, float) or math.isfinite(value) for value in record.values())
        if "step_time" in record:
            phases = [record[f"time/{name}_s"] for name in ("rollout", "reward", "logprobs", "backward", "update")]
            assert 0.7 * record["step_time"] < sum(phases) <= record["step_time"]
            assert record["learning_rate"] == 1e-2 and record["weights_changed_frac"] > 0.5
            # Sampler and trainer compute the same numbers.
            assert record["sampling/sampling_logp_difference/max"] < 5e-5


def test_rollouts_agree_with_the_records(plain_run):
    for record in training_records(plain_run.run_dir):
        table = pyarrow.parquet.read_table(plain_run.run_dir / "rollouts" / f"step-{record['step']:06d}.parquet")
        rows = table.to_pylist()
        assert [(row["group"], row["sample"]) for row in rows] == [(g, s) for g in range(3) for s in range(4)]
        assert small_letters([row["completion"] for row in rows]) == [row["reward"] for row in rows]
        assert record["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 12)
        for group in range(3):
            own = [row for row in rows if row["group"] == group]
            assert sum(row["advantage"] for row in own) == pytest.approx(0, abs=1e-5)
            assert len({row["prompt"] for row in own}) == 1
            order = sorted(own, key=lambda row: row["reward"])
            assert all(a["advantage"] <= b["advantage"] for a, b in pairwise(order))
        assert len({row["row_id"] for row in rows}) == 3


def test_the_written_configuration_is_the_whole_one(plain_run, config):
    written = yaml.safe_load((plain_run.run_dir / "config.yaml").read_text())
    assert written["optim"]["lr"] == 1e-2 and written["run"]["keep_last"] == 2
    assert api.load(plain_run.run_dir / "config.yaml").config == api.load(config).config


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(plain_run, config, tmp_path):
    again = train(config, out=tmp_path / "again")
    assert final_digest(again.run_dir) == final_digest(plain_run.run_dir)
    assert records_of(again.run_dir) == records_of(plain_run.run_dir)
    other = train(config, {"run.seed": 2}, out=tmp_path / "other")
    assert final_digest(other.run_dir) != final_digest(plain_run.run_dir)
    assert records_of(other.run_dir)[0] == records_of(plain_run.run_dir)[0]  # the same held-out prompts, greedy
    assert records_of(other.run_dir)[1] != records_of(plain_run.run_dir)[1]


def test_evaluation_checkpoints_and_trackers_leave_training_alone(plain_run, config, tmp_path):
    changes = {"run.eval_every": 0, "run.checkpoint_every": 0, "run.trackers": ["tensorboard"], "run.eval_pass_k": 2}
    result = train(config, changes, out=tmp_path / "run")
    assert final_digest(result.run_dir) == final_digest(plain_run.run_dir)
    assert evaluations_of(result.run_dir) == [0, 4]
    assert names_in(result.run_dir / "checkpoints") == ["step-000004"]
    board = EventAccumulator(str(result.run_dir / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("reward")] == [1, 2, 3, 4]
    assert [event.step for event in board.Scalars("eval/reward")] == [0, 4]
    expected = [record["reward"] for record in read_metrics(result.run_dir / "metrics.jsonl") if "reward" in record]
    assert [event.value for event in board.Scalars("reward")] == pytest.approx(expected)


def test_final_loads_in_plain_transformers(config, tmp_path, monkeypatch):
    kept = {}
    real = loop.save_policy

    def save(policy, folder):
        kept[folder.name] = policy
        real(policy, folder)

    monkeypatch.setattr(loop, "save_policy", save)
    result = train(config, {"model.dtype": "bfloat16"}, out=tmp_path / "run")
    policy = kept["final"].model
    loaded = AutoModelForCausalLM.from_pretrained(result.run_dir / "final", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir / "final")
    ids = tokenizer("What is 3 + 4? ü", return_tensors="pt").input_ids
    policy.eval(), loaded.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, policy(ids).logits)
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    start = AutoModelForCausalLM.from_pretrained(config["model"]["name"], dtype=torch.bfloat16)
    assert not torch.equal(loaded(ids).logits, start(ids).logits)


def test_keep_last(config, tmp_path):
    result = train(config, {"run.checkpoint_every": 1, "run.keep_last": 3}, out=tmp_path / "run")
    assert names_in(result.run_dir / "checkpoints") == ["step-000002", "step-000003", "step-000004"]


def test_keep_best_holds_the_weights_of_the_best_evaluation(config, tmp_path):
    result = train(config, {"run.keep_best": True, "run.steps": 12, "optim.lr": 0.02}, out=tmp_path / "run")
    evaluations = [r for r in read_metrics(result.run_dir / "metrics.jsonl") if "eval/n" in r]
    best = max(evaluations, key=lambda r: r["eval/reward"])
    assert 0 < best["step"] < 12, "choose a learning rate at which the best one is neither the first nor the last"
    assert not list((result.run_dir / "best").glob("*state*"))  # weights only
    same = {key: config[key] for key in ("task", "rewards", "rollout")} | {"model.dtype": "float32"}
    again = api.evaluate(str(result.run_dir / "best"), same, rewards={HERE: small_letters})
    assert again.metrics["eval/reward"] == best["eval/reward"]
    final = api.evaluate(str(result.run_dir), rewards={HERE: small_letters})
    assert final.metrics["eval/reward"] == evaluations[-1]["eval/reward"]


def test_it_learns(config, tmp_path):
    result = train(config, {"run.steps": 30, "run.eval_every": 0, "run.checkpoint_every": 0}, out=tmp_path / "run")
    assert result.summary["eval_reward_start"] < 0.1
    assert result.summary["eval_reward_end"] > 0.8
    log = (result.run_dir / "train.log").read_text()
    assert "held-out reward 0.0" in log and log.count("example   ") == 3


VARIANTS = {
    "reference, two updates a batch, bfloat16": {
        "algo.beta": 0.1, "algo.iterations_per_batch": 2, "model.dtype": "bfloat16", "memory.micro_batch_tokens": 99,
    },
    "checkpointing": {"memory.checkpointing": "full", "memory.generation_chunk": 5},
    "two rewards": {
        "rewards": [{"function": HERE}, {"name": "soft_overlong", "weight": 0.1, "buffer_tokens": 4}],
        "algo.combine": "normalize_each",
    },
    "entropy bonus, warm-up, bfloat16 without masters": {
        "algo.entropy_bonus": 0.01, "optim.warmup_steps": 2, "model.dtype": "bfloat16", "model.master_dtype": "none",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def variant(request, config, tmp_path_factory):
    """A run with other maths or another use of memory, and what was changed."""
    return request.param, train(config, request.param, out=tmp_path_factory.mktemp("variant") / "run")


def test_variants(variant, plain_run):
    changes, result = variant
    steps = training_records(result.run_dir)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert math.isfinite(record["loss"]) and 0 < record["grad_norm"] < 1e3
    if "algo.beta" in changes:
        # Already in step 1 the policy leaves the reference, with the first of its two updates.
        assert all(record["kl"] > 0 for record in steps)
        assert all(record["kl_old"] > 0 and record["ratio_mean"] != 1 for record in steps)
    else:
        assert all("kl" not in record and record["kl_old"] == 0 for record in steps)
    if "rewards" in changes:
        assert {"rewards/small_letters/mean", "rewards/soft_overlong/mean"} <= steps[0].keys()
        total = steps[0]["rewards/small_letters/mean"] + 0.1 * steps[0]["rewards/soft_overlong/mean"]
        assert steps[0]["reward"] == pytest.approx(total)
    if "optim.warmup_steps" in changes:
        assert [r["learning_rate"] for r in steps] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    if "memory.checkpointing" in changes:
        expected = weights_of(plain_run.run_dir)
        for name, tensor in weights_of(result.run_dir).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-4, msg=name)


def test_resumed_variants_end_with_the_same_bits(variant, config, tmp_path):
    changes, whole = variant
    train(config, {**changes, "run.steps": 2}, out=tmp_path / "run")
    halves = train(None, {"run.steps": 4}, resume=tmp_path / "run")
    assert final_digest(halves.run_dir) == final_digest(whole.run_dir)
    assert records_of(halves.run_dir) == records_of(whole.run_dir)


def huge(completions, **kwargs):
    """Finite rewards whose gradient overflows float32."""
    return [1e38 * value for value in small_letters(completions)]


def test_steps_whose_gradient_is_not_finite_are_skipped_and_end_the_run(config, tmp_path):
    changes = {"algo.advantage": "none", "run.max_nonfinite_steps": 2, "run.checkpoint_every": 0}
    with pytest.raises(NonFiniteError) as raised:
        train(config, changes, out=tmp_path / "run", rewards={HERE: huge})
    assert raised.value.exit_code == 4
    assert "in 2 steps in a row" in raised.value.what and "--resume" in raised.value.fix
    steps = training_records(tmp_path / "run")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["weights_changed_frac"] is None and record["nonfinite"] for record in steps)
    start = AutoModelForCausalLM.from_pretrained(config["model"]["name"]).state_dict()
    kept = weights_of(tmp_path / "run", checkpoint="step-000002")
    assert all(torch.equal(kept[name], start[name]) for name in kept)
    assert "the update was skipped" in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_policy_whose_weights_overflowed_ends_the_run(config, tmp_path):
    with pytest.raises(NonFiniteError, match="logprobs are not finite") as raised:
        train(config, {"optim.lr": 1e38, "run.eval_every": 0}, out=tmp_path / "run")
    assert raised.value.values == "12 of 12 completions, sampled after step 1"
    assert [record["step"] for record in training_records(tmp_path / "run")] == [1]


def test_one_step_that_is_not_finite_does_not_end_the_run(config, tmp_path):
    calls = []

    def once(completions, **kwargs):
        calls.append(1)
        return huge(completions) if len(calls) == 3 else small_letters(completions)

    changes = {"algo.advantage": "none", "run.max_nonfinite_steps": 2}
    result = train(config, changes, out=tmp_path / "run", rewards={HERE: once})
    changed = [record["weights_changed_frac"] for record in training_records(result.run_dir)]
    assert [value is None for value in changed] == [False, True, False, False]


def test_the_default_directory_and_latest(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = {"run.steps": 1, "run.eval_every": 0}
    first, second = (train(config, short) for _ in range(2))
    assert first.run_dir.parent == second.run_dir.parent == Path("runs")
    assert first.run_dir != second.run_dir
    assert Path("runs/latest").is_symlink() and Path("runs/latest").resolve() == second.run_dir.resolve()
    train(None, resume="runs/" + first.run_dir.name)
    assert Path("runs/latest").resolve() == first.run_dir.resolve()


def test_default_directories_are_numbered(tmp_path, monkeypatch):
    from datetime import datetime

    monkeypatch.chdir(tmp_path)
    now = datetime(2030, 1, 2, 3, 4)
    assert default_run_dir("a", now) == Path("runs/a-0102-0304")
    Path("runs/a-0102-0304").mkdir(parents=True)
    assert default_run_dir("a", now) == Path("runs/a-0102-0304-2")


def test_somebodys_own_folder_latest_stays(config, tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").write_text("x")
    train(config, {"run.steps": 1, "run.eval_every": 0}, out=tmp_path / "run")
    assert (tmp_path / "latest" / "mine").read_text() == "x"


def test_a_directory_that_exists_is_refused(config, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(RunError, match="exists") as raised:
        train(config, out=tmp_path / "mine")
    assert "something else" in raised.value.values
    assert names_in(tmp_path / "mine") == ["thesis.txt"]


def test_out_and_resume_contradict_each_other(plain_run, tmp_path):
    with pytest.raises(UserError, match="out"):
        train(None, resume=plain_run.run_dir, out=tmp_path / "elsewhere")
    with pytest.raises(UserError, match="either"):
        train({}, resume=plain_run.run_dir)


def test_a_function_that_no_reward_uses_is_an_error(config, tmp_path):
    with pytest.raises(ConfigError, match="no reward uses"):
        train(config, out=tmp_path / "run", rewards={HERE: small_letters, "here:other": small_letters})
    assert list(tmp_path.iterdir()) == []
