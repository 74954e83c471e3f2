"""Trackers, for real: event files that TensorBoard reads, and W&B in offline mode."""

from __future__ import annotations

import json
import sys
import time

import pytest

from grpofit.errors import ConfigError
from grpofit.training.trackers import Trackers

CONFIG = {"model": {"name": "smollm2-135m"}, "run": {"seed": 1}}


def test_no_trackers_do_nothing(tmp_path):
    trackers = Trackers([], tmp_path, CONFIG)
    trackers.log(1, {"reward": 1.0})
    trackers.close()
    assert trackers.where == []
    assert list(tmp_path.iterdir()) == []


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)], events


def test_tensorboard(tmp_path):
    trackers = Trackers(["tensorboard"], tmp_path, CONFIG)
    for step in (1, 2, 3):
        trackers.log(step, {"step": step, "reward": step / 10, "sample": {"completion": "x"}, "kl": None})
    points, events = scalars(tmp_path / "tensorboard", "reward")  # before close: a killed run must not lose them
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert sorted(events.Tags()["scalars"]) == ["reward", "step"]
    assert "smollm2-135m" in str(events.Tensors("config/text_summary"))
    assert trackers.where == [f"tensorboard --logdir {tmp_path / 'tensorboard'}"]
    trackers.close()


def test_tensorboard_resumed_hides_what_lay_past_the_checkpoint(tmp_path):
    first = Trackers(["tensorboard"], tmp_path, CONFIG)
    for step in (1, 2, 3, 4):
        first.log(step, {"reward": step / 10})
    first.close()
    resumed = Trackers(["tensorboard"], tmp_path, CONFIG, resume=True)
    for step in (3, 4):
        resumed.log(step, {"reward": 0.9})
    resumed.close()
    assert scalars(tmp_path / "tensorboard", "reward")[0] == [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9)]


def wandb_records(path):
    """The protobuf messages of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, message = path.read_bytes(), 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:  # too little of the block is left for a record's header
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def wandb_history(run_dir):
    """(run id, history rows) of each offline run, oldest first, read from W&B's own files."""
    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        rows, run_id = [], None
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
            if record.WhichOneof("record_type") == "history":
                values = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                rows.append({key: value for key, value in values.items() if not key.startswith("_")})
        found.append((run_id, rows))
    return found


def test_wandb_offline_and_the_same_run_after_a_resume(tmp_path):
    first = Trackers(["wandb"], tmp_path, CONFIG)
    first.log(1, {"reward": 0.1, "note": "text"})
    first.log(2, {"reward": 0.2})
    first.close()
    resumed = Trackers(["wandb"], tmp_path, CONFIG, resume=True)
    resumed.log(2, {"reward": 0.7})
    where = resumed.where
    resumed.close()

    run_id = (tmp_path / "wandb_id").read_text()
    expected = [
        (run_id, [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]),
        (run_id, [{"step": 2, "reward": 0.7}]),
    ]
    until = time.monotonic() + 20  # W&B's own service writes the file, after close() has returned on a busy machine
    while wandb_history(tmp_path) != expected and time.monotonic() < until:
        time.sleep(0.1)
    assert wandb_history(tmp_path) == expected
    assert where == [f"wandb sync {tmp_path}/wandb/offline-run-*"]


def test_a_new_run_in_wandb_is_a_new_one(tmp_path):
    ids = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Trackers(["wandb"], tmp_path / name, CONFIG).close()
        ids.add((tmp_path / name / "wandb_id").read_text())
    assert len(ids) == 2


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_missing_package_is_told_at_the_start(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=f"run.trackers has {name}, which is not installed") as caught:
        Trackers([name], tmp_path, CONFIG)
    assert caught.value.fix == "pip install 'grpofit[track]'"
    assert all((caught.value.values, caught.value.why))


def test_a_tracker_that_breaks_is_left_out_and_the_run_goes_on(tmp_path):
    told: list[str] = []
    trackers = Trackers(["tensorboard"], tmp_path, CONFIG, report=told.append)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    trackers.log(1, {"reward": 0.1})
    trackers.log(2, {"reward": 0.2})
    trackers.close()
    assert len(told) == 1
    assert told[0].startswith("tracker tensorboard failed and is off for the rest of this run:")
