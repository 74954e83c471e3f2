"""Checkpoints: written beside, synced, renamed, checksummed; the newest whole one is used.

Owns the folder `checkpoints/` of a run. A checkpoint is one folder `step-000010` with the optimizer's tensors
(masters and moments; weights are the masters' rounding) and a small JSON. Randomness needs no state: every draw is
keyed. Must not know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpofit.errors import CheckpointError
from grpofit.units import gib

_TENSORS = "state.safetensors"
_RECORD = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that passed its checks. `step` is the number of finished steps."""

    folder: Path
    step: int
    record: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write `folder/step-NNNNNN`; a crash at any instant leaves either the whole checkpoint or none of that name.

    Raises:
        CheckpointError: the disk is full, read-only, or gone; what was there before is untouched.
    """
    final = _name(folder, step)
    beside = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, beside / _TENSORS)
        checksums = {name: _checksum(tensor) for name, tensor in on_cpu.items()}
        text = json.dumps({"step": step, **record, "sha256": checksums}, indent=1)
        (beside / _RECORD).write_text(json.dumps({"sha256": _digest(text.encode()), "body": text}))
        for path in (beside / _TENSORS, beside / _RECORD, beside):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(beside, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise CheckpointError(
            f"checkpoint of step {step} could not be written",
            values=f"{error}\nneeds {gib(needed)}, free on that disk {gib(free)}: {folder}",
            why="without it the steps since the last checkpoint would be lost; older checkpoints are untouched",
            fix="free space (or --set run.keep_last=1), then run the resume line",
        ) from error
    return final


def prune_checkpoints(folder: Path, keep_last: int, *, newest: int) -> None:
    """Delete all but the newest `keep_last`, and what crashed writes left behind.

    `newest` is the step just saved. One of a later step is the broken one that a resumed run passed over; it must not
    count among those kept.
    """
    for partial in folder.glob(".*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    kept = [path for path in _list(folder) if _step(path) <= newest][:keep_last]
    for path in _list(folder):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def load_newest(folder: Path, on_broken: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, or None if there never was one; each broken one is named to `on_broken`.

    Raises:
        CheckpointError: there are checkpoints, and every one is broken.
    """
    found = _list(folder)
    for path in found:
        try:
            return _load(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            on_broken(f"checkpoint {path.name} is broken ({error}); trying the one before it")
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {folder} can be read",
            values=", ".join(path.name for path in found),
            why="resuming from a damaged state would train something else without saying so",
            fix="restore the folder from a copy, or start again with another --out",
        )
    return None


def _load(path: Path) -> Checkpoint:
    outer = json.loads((path / _RECORD).read_text())
    if _digest(outer["body"].encode()) != outer["sha256"]:
        raise ValueError(f"{_RECORD} does not match its checksum")
    record = json.loads(outer["body"])
    tensors: dict[str, Tensor] = {}
    with safe_open(path / _TENSORS, framework="pt") as file:
        for name, expected in record.pop("sha256").items():
            tensors[name] = file.get_tensor(name)
            if _checksum(tensors[name]) != expected:
                raise ValueError(f"tensor {name} does not match its checksum")
    return Checkpoint(folder=path, step=record["step"], record=record, tensors=tensors)


def _name(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _list(folder: Path) -> list[Path]:
    """Newest first."""
    found = (path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checksum(tensor: Tensor) -> str:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
