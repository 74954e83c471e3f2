"""The figures of `benchmarks/vs_trl.py`: what is counted, compared and watched. No side is run here."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_tokenizer

pytest.importorskip("psutil")
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def vs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import vs_trl_ours
    import vs_trl_process
    import vs_trl_rates
    import vs_trl_rewards
    import vs_trl_shapes
    import vs_trl_table

    return SimpleNamespace(
        ours=vs_trl_ours,
        process=vs_trl_process,
        rates=vs_trl_rates,
        rewards=vs_trl_rewards,
        shapes=vs_trl_shapes,
        table=vs_trl_table,
    )


def test_rewards_read_text_and_messages(vs: SimpleNamespace) -> None:
    texts = ["7 + 5 = 12", "12 or 13", "none"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert vs.rewards.last_number(completions=texts, answer=["12"] * 3) == [1.0, 0.0, 0.0]
    assert vs.rewards.last_number(completions=messages, answer=["12"] * 3) == [1.0, 0.0, 0.0]
    assert vs.rewards.every_group(completions=texts) == vs.rewards.every_group(completions=messages)
    assert len(set(vs.rewards.every_group(completions=texts))) == 3


def test_flops_of_a_network_small_enough_to_count(vs: SimpleNamespace) -> None:
    size = vs.rates.ModelSize(layers=2, hidden=2, intermediate=3, heads=1, kv_heads=1, head_dim=2, vocabulary=5)
    # A layer: q, k, v, o of 2 x 2; gate and up of 2 x 3, down of 3 x 2: 34 weights.
    trained = vs.rates.Trained(tokens=10, head_tokens=4, attention_pairs=7, micro_batches=1)
    assert vs.rates.forward_flops(size, trained) == {
        "linears": 2 * 68 * 10,
        "head": 2 * 10 * 4,
        "attention": 2 * (2 + 2) * 2 * 7,  # scores and weighted values, 2 wide, 2 layers
    }


def test_share_of_the_matmul_rate(vs: SimpleNamespace) -> None:
    size = vs.rates.ModelSize(layers=1, hidden=2, intermediate=3, heads=1, kv_heads=1, head_dim=2, vocabulary=5)
    trained = vs.rates.Trained(tokens=10, head_tokens=0, attention_pairs=0, micro_batches=1)
    kinds = {"forward": 100.0, "input_gradient": 200.0, "weight_gradient": 300.0}
    share = vs.rates.matmul_share(size, trained, 20.4, {"linears": kinds, "head": kinds})
    assert share["matmul_flops"] == pytest.approx(200)
    assert share["reached_flops"] == pytest.approx(3 * 680 / 20.4)  # 100
    assert share["share"] == pytest.approx(0.5)


def test_trained_tokens_are_those_of_groups_with_signal(vs: SimpleNamespace) -> None:
    rows = [
        {"group": group, "prompt": prompt, "completion_tokens": count, "advantage": advantage}
        for group, prompt, count, advantage in (
            (0, "abc", 3, 1.0), (0, "abc", 1, -1.0), (1, "defghij", 6, 0.0), (1, "defghij", 2, 0.0)
        )
    ]  # fmt: skip
    trained = vs.ours._trained({"trained_tokens": 5, "micro_batches": 1}, rows, tiny_tokenizer())
    # The prompt's 3 tokens see 1 + 2 + 3; of the first completion, 2 see the prompt, and 1 + 2; the second has none.
    assert trained == vs.rates.Trained(tokens=5, head_tokens=4, attention_pairs=6 + 2 * 3 + 3, micro_batches=1)


def side(step_s: float, peak: float, **logs: float) -> dict[str, Any]:
    record = {
        "step_s": step_s, "rollout": 1.0, "generate": 0.5, "forward": 0.5, "backward": 1.5, "update": 0.1,
        "logs": {"completions/mean_length": 128, "completions/min_length": 128, "completions/max_length": 128,
                 "num_tokens": 32 * 640, **logs},
    }  # fmt: skip
    slow = {**record, "step_s": 100 * step_s}
    state = {"weights": 100, "gradients": 100, "optimizer": 200}
    return {"rounds": [[slow, record, record]], "state_bytes": state, "peak_rss_bytes": peak, "wall_s": 9.0}


def test_ratios_are_to_the_fastest_of_trls_runs_and_its_memory(vs: SimpleNamespace) -> None:
    shape = vs.shapes.SHAPES["guide_a"]
    runs = {"trl lean": side(10, 1000), "trl fast": side(8, 4400), "grpofit": side(2, 900)}
    summaries = {name: vs.table.summarise(run, shape) for name, run in runs.items()}
    assert summaries["grpofit"]["steps"] == 2 and summaries["grpofit"]["step_s"] == 2
    assert summaries["grpofit"]["sample_tokens_per_s"] == 32 * 128 / 0.5
    assert summaries["grpofit"]["train_tokens_per_s"] == 32 * 640 / 2.0
    found = {v.what: v for v in vs.table.compare(shape, summaries)}
    assert found["step"].value == 0.25 and found["step"].met
    assert found["peak"].value == pytest.approx(900 / 4400)
    assert found["rest"].value == 500 / 4000 and found["rest"].met
    assert found["step"].line() == "guide_a       step 0.250 of TRL's, goal at most 0.25: met"
    assert vs.table.better(summaries, "peak_bytes") == "trl lean"


def test_a_goal_is_a_bound_from_above_or_from_below(vs: SimpleNamespace) -> None:
    assert vs.table.verdict("guide_a", "matmul", 0.41).met and not vs.table.verdict("guide_a", "matmul", 0.39).met
    assert not vs.table.verdict("long_prompt", "step", 0.21).met
    assert vs.table.verdict("demo_all", "step", 9.0).goal is None


def test_work_that_is_not_the_same_is_found(vs: SimpleNamespace) -> None:
    shape = vs.shapes.SHAPES["guide_a"]
    same = {"trl": side(1, 1), "grpofit": side(1, 1)}
    assert vs.table.same_work(shape, same) == []
    shorter = same | {"grpofit": side(1, 1, **{"completions/min_length": 100})}
    assert "100" in vs.table.same_work(shape, shorter)[0]
    other_prompts = same | {"grpofit": side(1, 1, num_tokens=32 * 641)}
    assert "prompt tokens" in vs.table.same_work(shape, other_prompts)[0]


def test_gap_of_curves_over_seeds(vs: SimpleNamespace) -> None:
    ours = [[0.4, 0.6], [0.6, 0.8], [0.5, 0.5]]
    theirs = [[0.3, 0.5], [0.5, 0.5], [0.4, 0.6]]
    gap = vs.table.curve_gap(ours, theirs)  # per seed 0.1, 0.2, 0.0
    assert gap["gap"] == pytest.approx(0.1)
    assert gap["standard_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert gap["half_interval"] == pytest.approx(4.30 * 0.1 / math.sqrt(3))
    assert gap["agree"]
    worse = [[value - 0.2 for value in curve] for curve in theirs]
    assert not vs.table.curve_gap(worse, theirs)["agree"]


def test_prompts_stand_in_the_order_of_the_steps(
    vs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vs.shapes, "_model_folder", lambda folder, never_ends: folder)
    shape = replace(vs.shapes.SHAPES["demo"], prompts=100)
    work = vs.shapes.prepare(shape, tmp_path, steps=4, seed=1, lr=1e-5, loss="grpo", temperature=1.0)
    pool, ordered = (path.read_text().splitlines() for path in (work.pool, work.ordered))
    assert len(pool) == 399 and len(ordered) == 400
    assert len(set(ordered[:300])) == 300 and len(set(ordered[300:])) == 100  # three steps fill the first epoch


def test_memory_of_a_process_and_its_helpers(vs: SimpleNamespace, tmp_path: Path) -> None:
    hold = "import time; held = b'x' * {}; time.sleep(1.5)"
    helper = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {hold.format(200_000_000)!r}]); "
    ran = vs.process.run_watched([sys.executable, "-c", helper + hold.format(100_000_000)], tmp_path / "log", {})
    assert 200e6 < ran.helpers_bytes < 260e6
    assert 300e6 < ran.peak_bytes < 400e6
    assert 1.5 < ran.wall_s < 30


def test_a_failing_process_shows_its_last_words(vs: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(vs.process.ChildFailedError, match="no such thing"):
        vs.process.run_watched([sys.executable, "-c", "raise ValueError('no such thing')"], tmp_path / "log", {})
