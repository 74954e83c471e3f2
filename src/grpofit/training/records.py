"""What a run writes while it trains: one JSON line a record, one parquet file of rollouts a step.

Owns the file formats, and that a process killed at any instant leaves files that can be read and cut back to a
checkpoint. Must not know what the numbers mean, nor import torch: reports read these files without it.

A record is a flat dict; its key `step` says after which step it holds. JSON has no NaN and no infinity, so such a
value is written as null and named in `nonfinite`: `{"loss": null, "nonfinite": {"loss": "nan"}}`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpofit.errors import RunError
from grpofit.types import Rollout


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append `record` as one line and hand it to the operating system, so that killing this process cannot lose it.

    Values are what JSON knows, anything with `.item()` (numpy and torch scalars), and paths.
    """
    with path.open("ab") as file:
        file.write(_encode(record))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines file, oldest first; `[]` when it does not exist.

    A last line that a kill cut off is left out.

    Raises:
        RunError: a line other than the last is not JSON.
    """
    return [record for _, record in _read(path)]


def truncate_jsonl(path: Path, last_step: int) -> None:
    """Drop the records with `step` > `last_step` and a last line that a kill cut off; others stay as they are.

    The file is written anew beside the old one and renamed, so that it is never seen half done. A missing file stays
    missing.
    """
    if not path.exists():
        return
    kept = [line for line, record in _read(path) if record.get("step", last_step) <= last_step]
    _replace(path, b"".join(line + b"\n" for line in kept))


def write_rollouts(folder: Path, step: int, rollouts: Sequence[Rollout]) -> Path:
    """Write a step's rollouts, one row each, to `folder/step-000087.parquet`; returns the path.

    Columns: step, group, sample, row_id, prompt, completion, completion_tokens, finish, reward, advantage, then for
    each reward `score/NAME`, `reason/NAME` and `detail/NAME`, and `answer` as text if the rows have one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * len(rollouts), pa.int32()),
        "group": pa.array([r.group for r in rollouts], pa.int32()),
        "sample": pa.array([r.sample for r in rollouts], pa.int32()),
        "row_id": pa.array([r.prompt.row_id for r in rollouts], pa.int64()),
        "prompt": _text_column(r.prompt.text for r in rollouts),
        "completion": _text_column(r.completion.text for r in rollouts),
        "completion_tokens": pa.array([len(r.completion.token_ids) for r in rollouts], pa.int32()),
        "finish": _text_column(r.completion.finish for r in rollouts),
        "reward": pa.array([r.reward for r in rollouts], pa.float64()),
        "advantage": pa.array([r.advantage for r in rollouts], pa.float64()),
    }
    for name in dict.fromkeys(name for r in rollouts for name in r.scores):
        scores = [r.scores.get(name) for r in rollouts]
        columns[f"score/{name}"] = pa.array([s and s.value for s in scores], pa.float64())
        columns[f"reason/{name}"] = _text_column(s and s.reason for s in scores)
        columns[f"detail/{name}"] = _text_column(s and s.detail for s in scores)
    if any("answer" in r.prompt.columns for r in rollouts):
        columns["answer"] = _text_column(r.prompt.columns.get("answer") for r in rollouts)

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    beside = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), beside, compression="zstd")
    os.replace(beside, path)
    return path


def drop_rollouts_after(folder: Path, step: int) -> None:
    """Remove the rollout files of steps after `step`, and what a kill left half written."""
    for path in folder.glob("step-[0-9]*"):
        if path.suffix == ".tmp" or int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _text_column(values: Iterable[object]) -> Any:
    import pyarrow as pa

    # A lone surrogate is legal in a Python string, and reaches us from JSON data, but is not UTF-8.
    text = [None if v is None else str(v).encode("utf-8", "backslashreplace").decode() for v in values]
    return pa.array(text, pa.string())


def _encode(record: Mapping[str, Any]) -> bytes:
    """One line of strict JSON, UTF-8."""
    nonfinite: dict[str, str] = dict(record.get("nonfinite") or {})
    plain = {key: _plain(value, key, nonfinite) for key, value in record.items() if key != "nonfinite"}
    if nonfinite:
        plain["nonfinite"] = nonfinite
    line = json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "backslashreplace")  # a lone surrogate becomes \udXXX, which is JSON's own escape


def _plain(value: Any, key: str, nonfinite: dict[str, str]) -> Any:
    """`value` as JSON knows it; notes each non-finite number under its dotted key."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[key] = str(value)
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}", nonfinite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{key}.{i}", nonfinite) for i, v in enumerate(value)]
    return str(value) if isinstance(value, Path) else value


def _read(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line as written, and what it says."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append((line, json.loads(line)))
        except ValueError:
            if number == len(lines):
                break
            raise RunError(
                f"line {number} of {path} is not JSON",
                values=repr(line[:80]),
                why="a kill can only cut off the last line; skipping one in the middle could hide lost records",
                fix=f"sed -i {number}d '{path}'    (removes the line)",
            ) from None
    return records


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_suffix(path.suffix + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
