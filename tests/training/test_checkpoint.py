"""Checkpoints on a disk that lies, fills up or loses power."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from grpofit.errors import EXIT_STOPPED, CheckpointError
from grpofit.training import checkpoint
from grpofit.training.checkpoint import load_newest, prune_checkpoints, save_checkpoint

RECORD = {"elapsed_s": 1.5, "nonfinite_in_a_row": 0}


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    """As an optimizer's: matrices, a scalar, more than one dtype, one that is not contiguous."""
    return {
        "master/a": torch.arange(12, dtype=torch.float32).view(3, 4) + value,
        "step/a": torch.tensor(3.0 + value),
        "exp_avg/a": torch.linspace(-1, 1, 12).view(4, 3).t() * (1 + value),
        "weights/b": (torch.arange(7) + value).to(torch.bfloat16),
    }


def load(folder: Path) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    named: list[str] = []
    return load_newest(folder, named.append), named


def test_round_trip(tmp_path):
    given = tensors()
    path = save_checkpoint(tmp_path / "checkpoints", 10, given, RECORD)
    assert path.name == "step-000010"
    loaded, named = load(tmp_path / "checkpoints")
    assert (loaded.folder, loaded.step, named) == (path, 10, [])
    assert {key: loaded.record[key] for key in RECORD} == RECORD
    assert loaded.tensors.keys() == given.keys()
    for name, tensor in given.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)


def test_no_folder_and_an_empty_one_hold_no_checkpoint(tmp_path):
    assert load(tmp_path / "none") == (None, [])
    assert load(tmp_path) == (None, [])


def test_the_newest_is_used(tmp_path):
    for step in (9, 100, 10):
        save_checkpoint(tmp_path, step, tensors(step), RECORD)
    loaded, named = load(tmp_path)
    assert (loaded.step, named) == (100, [])
    assert torch.equal(loaded.tensors["master/a"], tensors(100)["master/a"])


def test_steps_of_seven_digits_are_newer_than_those_of_six(tmp_path):
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, step, tensors(), RECORD)
    assert load(tmp_path)[0].step == 1_000_000
    prune_checkpoints(tmp_path, 1, newest=1_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1000000"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 5, tensors(0), RECORD)
    save_checkpoint(tmp_path, 5, tensors(1), RECORD)
    assert torch.equal(load(tmp_path)[0].tensors["master/a"], tensors(1)["master/a"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_in_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def flip_the_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x01
    path.write_bytes(data)


DAMAGES = [truncate, empty, flip_in_the_middle, flip_the_last_byte, Path.unlink]


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_broken_one_is_named_and_the_one_before_is_used(tmp_path, file, damage):
    save_checkpoint(tmp_path, 2, tensors(2), RECORD)
    damage(save_checkpoint(tmp_path, 4, tensors(4), RECORD) / file)
    loaded, named = load(tmp_path)
    assert loaded.step == 2
    assert torch.equal(loaded.tensors["master/a"], tensors(2)["master/a"])
    [line] = named
    assert line.startswith("checkpoint step-000004 is broken (") and line.endswith("trying the one before it")


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
def test_every_single_bit_that_flips_is_noticed(tmp_path, file):
    """One bit in each byte. What still loads must be equal: a bit of white space may not matter."""
    path = save_checkpoint(tmp_path, 1, {"m": torch.arange(3.0)}, {"elapsed_s": 0.25}) / file
    whole = path.read_bytes()
    good = load(tmp_path)[0]
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            loaded = load(tmp_path)[0]
        except CheckpointError:
            continue
        assert loaded.record == good.record and loaded.tensors.keys() == good.tensors.keys(), place
        assert torch.equal(loaded.tensors["m"], good.tensors["m"]), place


@pytest.mark.parametrize("content", ["[]", "null", '{"sha256": 1, "body": 2}', '{"body": "{}"}'])
def test_a_record_of_another_form_is_a_broken_checkpoint(tmp_path, content):
    save_checkpoint(tmp_path, 1, tensors(), RECORD)
    (save_checkpoint(tmp_path, 2, tensors(), RECORD) / "state.json").write_text(content)
    assert load(tmp_path)[0].step == 1


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    old, new = (save_checkpoint(tmp_path, step, tensors(step), RECORD) for step in (1, 2))
    shutil.copy(old / "state.safetensors", new / "state.safetensors")
    assert load(tmp_path)[0].step == 1


def test_all_broken(tmp_path):
    for step in (2, 4):
        truncate(save_checkpoint(tmp_path, step, tensors(), RECORD) / "state.safetensors")
    named: list[str] = []
    with pytest.raises(CheckpointError) as raised:
        load_newest(tmp_path, named.append)
    assert len(named) == 2
    error = raised.value
    assert error.exit_code == EXIT_STOPPED
    assert "none of the 2 checkpoints" in error.what and str(tmp_path) in error.what
    assert error.values == "step-000004, step-000002" and error.why and "--out" in error.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]  # nothing is deleted


def test_what_a_crash_left_behind_is_no_checkpoint_and_is_cleared_away(tmp_path):
    save_checkpoint(tmp_path, 2, tensors(), RECORD)
    leftover = tmp_path / ".step-000004.partial"
    shutil.copytree(tmp_path / "step-000002", leftover)
    assert load(tmp_path)[0].step == 2
    prune_checkpoints(tmp_path, 2, newest=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_leftover_of_the_same_step_is_written_over(tmp_path):
    (tmp_path / ".step-000002.partial").mkdir()
    (tmp_path / ".step-000002.partial" / "rubbish").write_text("x")
    path = save_checkpoint(tmp_path, 2, tensors(), RECORD)
    assert sorted(file.name for file in path.iterdir()) == ["state.json", "state.safetensors"]
    assert load(tmp_path)[0].step == 2


def test_keep_last(tmp_path):
    for step in (2, 4, 6, 8):
        save_checkpoint(tmp_path, step, tensors(), RECORD)
    prune_checkpoints(tmp_path, 3, newest=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000006", "step-000008"]
    prune_checkpoints(tmp_path, 1, newest=8)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008"]


class Crash(BaseException):
    """The power goes: no handler runs."""


def crash_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the `count`-th call that touches the disk crash, before or (odd counts) after it has acted."""
    calls = 0

    def crashing(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            before, after = calls == count / 2, calls == (count + 1) / 2
            if before:
                raise Crash
            result = real(*args, **kwargs)
            if after:
                raise Crash
            return result

        return call

    for owner, name in (
        (checkpoint.shutil, "rmtree"),
        (checkpoint.os, "replace"),
        (checkpoint, "save_file"),
        (checkpoint, "_sync"),
        (Path, "mkdir"),
        (Path, "write_text"),
    ):
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name)))


def test_a_crash_at_any_point_leaves_the_old_or_the_new(tmp_path):
    seen = set()
    for count in range(1, 100):
        folder = tmp_path / str(count)
        save_checkpoint(folder, 2, tensors(2), RECORD)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, count)
            try:
                save_checkpoint(folder, 4, tensors(4), RECORD)
                crashed = False
            except Crash:
                crashed = True
        loaded, named = load(folder)
        assert named == [] and loaded.step in (2, 4)
        assert torch.equal(loaded.tensors["exp_avg/a"], tensors(loaded.step)["exp_avg/a"])
        seen.add(loaded.step)
        save_checkpoint(folder, 6, tensors(6), RECORD)  # the run goes on
        assert load(folder)[0].step == 6
        if not crashed:
            break
    assert not crashed and seen == {2, 4} and count > 15


@pytest.mark.parametrize(
    "place, error",
    [
        ("save_file", OSError(errno.ENOSPC, "No space left on device")),
        ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("_sync", OSError(errno.EIO, "Input/output error")),
        ("mkdir", OSError(errno.EROFS, "Read-only file system")),
    ],
    ids=["full", "full, said by safetensors", "broken", "read-only"],
)
def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch, place, error):
    save_checkpoint(tmp_path, 2, tensors(2), RECORD)

    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr(Path if place == "mkdir" else checkpoint, place, failing)
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(tmp_path, 4, tensors(4), RECORD)
    monkeypatch.undo()
    assert raised.value.what == "checkpoint of step 4 could not be written"
    assert str(error) in raised.value.values
    needed = sum(tensor.nbytes for tensor in tensors().values())
    assert needed == 12 * 4 + 4 + 12 * 4 + 7 * 2
    assert "needs 0.0 MiB, free on that disk " in raised.value.values and str(tmp_path) in raised.value.values
    assert "keep_last=1" in raised.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert load(tmp_path)[0].step == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    big = {"m": torch.arange(25_000, dtype=torch.float32)}
    save_checkpoint(small_disk, 2, big, RECORD)
    save_checkpoint(small_disk, 4, big, RECORD)
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(small_disk, 6, big, RECORD)
    assert "No space left" in raised.value.values or "no space" in raised.value.values.lower()
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-000002", "step-000004"]
    loaded, named = load(small_disk)
    assert (loaded.step, named) == (4, []) and torch.equal(loaded.tensors["m"], big["m"])
    prune_checkpoints(small_disk, 1, newest=4)
    save_checkpoint(small_disk, 6, big, RECORD)
    assert load(small_disk)[0].step == 6


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="checkpoint of step 1 could not be written"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, tensors(), RECORD)


def test_saving_changes_no_tensor_and_keeps_none(tmp_path):
    given = tensors()
    copies = {name: tensor.clone() for name, tensor in given.items()}
    save_checkpoint(tmp_path, 1, given, RECORD)
    given["master/a"] += 1  # training goes on: what was saved must not follow
    assert torch.equal(load(tmp_path)[0].tensors["master/a"], copies["master/a"])


def test_a_run_that_went_back_to_an_older_one_forgets_the_broken_newer_one(tmp_path):
    """Else `keep_last` would count the broken one, and delete the only good one."""
    save_checkpoint(tmp_path, 8, tensors(), RECORD)
    truncate(save_checkpoint(tmp_path, 10, tensors(), RECORD) / "state.safetensors")
    assert load(tmp_path)[0].step == 8
    save_checkpoint(tmp_path, 9, tensors(9), RECORD)
    prune_checkpoints(tmp_path, 1, newest=9)
    loaded, named = load(tmp_path)
    assert (loaded.step, named) == (9, [])


def test_the_record_is_readable_json(tmp_path):
    path = save_checkpoint(tmp_path, 3, tensors(), RECORD)
    body = json.loads(json.loads((path / "state.json").read_text())["body"])
    assert body["step"] == 3 and body["elapsed_s"] == 1.5 and set(body["sha256"]) == set(tensors())
    assert os.stat(path / "state.safetensors").st_size > 100
