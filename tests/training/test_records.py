"""Records: strict JSON whatever the numbers, and files that survive being cut off anywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpofit.errors import RunError
from grpofit.training.records import append_jsonl, drop_rollouts_after, read_metrics, truncate_jsonl, write_rollouts
from grpofit.types import Completion, FinishReason, Prompt, Reason, Rollout, Score


def test_one_line_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1, "reward": 0.5, "note": "two\nlines é"})
    append_jsonl(path, {"step": 2, "sample": {"completion": "x", "reward": None}, "file": Path("a/b")})
    assert path.read_text("utf-8").splitlines() == [
        '{"step": 1, "reward": 0.5, "note": "two\\nlines é"}',
        '{"step": 2, "sample": {"completion": "x", "reward": null}, "file": "a/b"}',
    ]
    assert read_metrics(path)[0] == {"step": 1, "reward": 0.5, "note": "two\nlines é"}


def test_non_finite_numbers_are_null_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1, "loss": math.nan, "norms": [1.0, math.inf], "a": {"b": np.float32("-inf")}})
    expected = {"loss": "nan", "norms.1": "inf", "a.b": "-inf"}
    assert read_metrics(path) == [
        {"step": 1, "loss": None, "norms": [1.0, None], "a": {"b": None}, "nonfinite": expected}
    ]


def test_numpy_and_torch_scalars_are_numbers(tmp_path):
    import torch

    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": np.int64(3), "x": np.float64(0.25), "y": torch.tensor(2.5), "flag": True})
    assert path.read_text() == '{"step": 3, "x": 0.25, "y": 2.5, "flag": true}\n'


def test_what_is_not_data_is_refused_and_writes_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(TypeError):
        append_jsonl(path, {"step": 1, "x": object()})
    assert read_metrics(path) == []


def test_lone_surrogate_survives(tmp_path):
    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": 1, "text": "bad \ud800 end"})
    assert read_metrics(path) == [{"step": 1, "text": "bad \ud800 end"}]


@given(st.dictionaries(st.text(), st.floats() | st.text() | st.integers(), max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_record_is_one_line_of_strict_json(tmp_path, record):
    path = tmp_path / "m.jsonl"
    path.unlink(missing_ok=True)
    append_jsonl(path, record)
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 2 and lines[1] == b""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(lines[0], parse_constant=refuse)


@pytest.fixture
def four_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 0, "eval/accuracy": 0.4})
    for step in (1, 2, 3, 4):
        append_jsonl(path, {"step": step, "reward": step / 10})
    append_jsonl(path, {"event": "no step"})
    return path


def test_truncate_drops_later_steps_and_keeps_the_rest_byte_for_byte(four_steps):
    before = four_steps.read_bytes().splitlines(keepends=True)
    truncate_jsonl(four_steps, 2)
    assert four_steps.read_bytes() == b"".join([*before[:3], before[5]])


@pytest.mark.parametrize("missing_bytes", [1, 2, 10, 21])
def test_a_torn_last_line_is_dropped(four_steps, missing_bytes):
    append_jsonl(four_steps, {"step": 5, "reward": 0.5})
    whole = four_steps.read_bytes()
    four_steps.write_bytes(whole[:-missing_bytes])
    complete = missing_bytes == 1  # only the newline is missing
    assert [r.get("step") for r in read_metrics(four_steps)] == [0, 1, 2, 3, 4, None] + [5] * complete
    truncate_jsonl(four_steps, 5)
    append_jsonl(four_steps, {"step": 6})
    assert [r.get("step") for r in read_metrics(four_steps)] == [0, 1, 2, 3, 4, None] + [5] * complete + [6]


def test_torn_inside_a_multibyte_character(tmp_path):
    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": 1, "text": "é"})
    path.write_bytes(path.read_bytes() + '{"step": 2, "text": "é'.encode()[:-1])
    assert [r["step"] for r in read_metrics(path)] == [1]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(four_steps):
    lines = four_steps.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:9] + b"\n"
    four_steps.write_bytes(b"".join(lines))
    before = four_steps.read_bytes()
    with pytest.raises(RunError, match=r"line 3 of .*metrics\.jsonl is not JSON") as caught:
        truncate_jsonl(four_steps, 1)
    assert "sed -i 3d" in caught.value.fix
    assert four_steps.read_bytes() == before


def test_missing_file_stays_missing(tmp_path):
    truncate_jsonl(tmp_path / "none.jsonl", 3)
    assert read_metrics(tmp_path / "none.jsonl") == []
    assert list(tmp_path.iterdir()) == []


def rollout(group: int, sample: int, text: str, scores: dict[str, Score], reward: float | None, **columns) -> Rollout:
    prompt = Prompt(10 + group, f"prompt {group}", f"prompt {group}", (1, 2), columns)
    completion = Completion((5, 6, 7), (-0.1, -0.2, -0.3), FinishReason.STOP, text)
    return Rollout(prompt, completion, group, sample, scores, reward, 0.5)


def test_rollouts_as_a_table(tmp_path):
    rows = [
        rollout(0, 0, "7", {"last_number": Score(1.0, Reason.CORRECT)}, 1.0, answer=7),
        rollout(0, 1, "bad \ud800", {"last_number": Score(None, Reason.ERROR, "ZeroDivisionError")}, None, answer="x"),
        rollout(1, 0, "", {"format": Score(0.0, Reason.SCORED)}, 0.0),
    ]
    path = write_rollouts(tmp_path / "rollouts", 87, rows)
    assert path.name == "step-000087.parquet"
    table = pq.read_table(path).to_pydict()
    assert list(table) == [
        *("step", "group", "sample", "row_id", "prompt", "completion", "completion_tokens", "finish"),
        *("reward", "advantage", "score/last_number", "reason/last_number", "detail/last_number"),
        *("score/format", "reason/format", "detail/format", "answer"),
    ]
    assert table["step"] == [87, 87, 87]
    assert table["row_id"] == [10, 10, 11]
    assert table["completion"] == ["7", "bad \\ud800", ""]
    assert table["completion_tokens"] == [3, 3, 3]
    assert table["finish"] == ["stop"] * 3
    assert table["reward"] == [1.0, None, 0.0]
    assert table["score/last_number"] == [1.0, None, None]
    assert table["reason/last_number"] == ["correct", "error", None]
    assert table["detail/last_number"] == ["", "ZeroDivisionError", None]
    assert table["score/format"] == [None, None, 0.0]
    assert table["answer"] == ["7", "x", None]


def test_drop_rollouts_after_a_checkpoint(tmp_path):
    for step in (1, 9, 10, 11):
        write_rollouts(tmp_path, step, [rollout(0, 0, "x", {}, None)])
    (tmp_path / "step-000012.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    drop_rollouts_after(tmp_path, 9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000001.parquet", "step-000009.parquet"]
    drop_rollouts_after(tmp_path / "none", 0)
