"""Tables of rows read from files and data sets.

Owns reading and the errors of reading: a row keeps the number under which its author finds it. Must not know
prompts, splits or rewards. Nothing that is read is unpickled, and no code that comes with a data set is run.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpofit.errors import DataError

Row = dict[str, Any]
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".parquet")


@dataclass(frozen=True)
class Table:
    """Rows with the place each came from.

    Attributes:
        name: file or data set, as the user wrote it.
        unit: `line` or `row`, what `numbers` count (from 1).
    """

    name: str
    rows: list[Row]
    numbers: Sequence[int]
    unit: str = "row"

    def where(self, index: int) -> str:
        """`line 7 of "train.jsonl"`."""
        return f'{self.unit} {self.numbers[index]} of "{self.name}"'


def nearest(word: str, words: Iterable[str]) -> str:
    """`'did you mean "x"? '`, or nothing when no word is near."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f'did you mean "{close[0]}"? ' if close else ""


def read_file(name: str, base_dir: Path, key: str) -> Table:
    """Read a JSONL, CSV or parquet file; `key` is the config key that named it.

    Raises:
        DataError: missing, unreadable, of an unknown kind, empty, or with a broken line (its number is given).
    """
    path = base_dir / Path(name).expanduser()
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise DataError(
            f'{key} "{name}" is of an unknown kind',
            values=f'ending "{path.suffix}"; known: {", ".join(_SUFFIXES)}',
            why="the ending decides how the file is read",
            fix=f"convert it to JSONL (one JSON object a line) and set {key} to FILE.jsonl",
        )
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
        raise DataError(
            f'{key} "{name}" is not a file',
            values=f"looked for {path}",
            why="without rows there is nothing to train on",
            fix=f"{nearest(path.name, siblings)}set {key} to a path that exists (relative to the YAML file)",
        )
    try:
        table = _read(path, name, suffix)
    except DataError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise DataError(
            f'{key} "{name}" cannot be read',
            values=f"{type(error).__name__}: {error}",
            why="rows that cannot be read would be missing without a word",
            fix=f"check the file ({path}); its ending must say what it is, its text must be UTF-8",
        ) from error
    if not table.rows:
        raise DataError(
            f'{key} "{name}" has no rows',
            values=f"{path.stat().st_size} bytes",
            why="without rows there is nothing to train on",
            fix="put at least two rows into it, or name another file",
        )
    return table


def _read(path: Path, name: str, suffix: str) -> Table:
    if suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
        return Table(name, rows, range(1, len(rows) + 1))
    return _read_csv(path, name) if suffix == ".csv" else _read_jsonl(path, name)


def _read_jsonl(path: Path, name: str) -> Table:
    rows, numbers = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                problem = "" if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"
            except ValueError as error:  # UnicodeDecodeError is one too
                row, problem = None, str(error)
            if problem:
                raise _broken_line(name, number, problem, text)
            rows.append(row)
            numbers.append(number)
    return Table(name, rows, numbers, "line")


def _broken_line(name: str, number: int, problem: str, text: bytes) -> DataError:
    shown = text.decode("utf-8", "replace").strip()
    convert = f"write one object a line: jq -c '.[]' {name} > rows.jsonl"
    return DataError(
        f'line {number} of "{name}" is not one JSON object',
        values=f"{problem}; the line begins: {shown[:80]}",
        why="a file read only in part would change what is trained",
        fix=convert if shown.startswith("[") else f"correct or delete line {number}",
    )


def _read_csv(path: Path, name: str) -> Table:
    rows, numbers = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        columns = reader.fieldnames or []
        for row in reader:
            found = sum(value is not None for column, value in row.items() if column is not None)
            if None in row or found < len(columns):
                raise DataError(
                    f'line {reader.line_num} of "{name}" does not have as many fields as the header',
                    values=f"{found + len(row.get(None) or [])} fields, columns: {', '.join(columns)}",
                    why="fields would land in the wrong columns",
                    fix="quote fields that hold commas, or correct the line",
                )
            rows.append(row)
            numbers.append(reader.line_num)
    return Table(name, rows, numbers, "line")


def read_dataset(name: str, subset: str | None, split: str, base_dir: Path) -> Table:
    """Read one split of a hub data set, or of a local folder (saved by `save_to_disk`, or of data files).

    Raises:
        DataError: not found, offline and not in the cache, no such subset or split, or empty.
    """
    folder = base_dir / Path(name).expanduser()
    local = folder.is_dir()
    try:
        dataset = _load(folder if local else name, subset, split)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises its own, the hub client's, pyarrow's and fsspec's errors
        raise _dataset_error(name, subset, split, local, error) from error
    rows = dataset.to_list()
    if not rows:
        raise DataError(
            f'split "{split}" of data set "{name}" has no rows',
            values=f"{dataset}",
            why="without rows there is nothing to train on",
            fix="name another split in task.split",
        )
    return Table(f"{name}[{split}]", rows, range(1, len(rows) + 1))


def _load(source: Path | str, subset: str | None, split: str) -> Any:
    import datasets

    if isinstance(source, Path) and ((source / "dataset_dict.json").exists() or (source / "state.json").exists()):
        dataset = datasets.load_from_disk(str(source))
        if isinstance(dataset, datasets.DatasetDict):
            if split not in dataset:
                raise ValueError(f'unknown split "{split}"; there are: {", ".join(dataset)}')
            return dataset[split]
        if split != "train":
            raise ValueError(f'unknown split "{split}"; the folder holds one data set without splits (use "train")')
        return dataset
    return datasets.load_dataset(str(source), subset, split=split)


def _dataset_error(name: str, subset: str | None, split: str, local: bool, error: Exception) -> DataError:
    """Tells a data set that could not be reached from one that is there but has no such part."""
    asked = f'data set "{name}"' + (f', configuration "{subset}"' if subset else "") + f', split "{split}"'
    unreachable = isinstance(error, OSError) and not local  # ConnectionError and FileNotFoundError are OSErrors
    download = f'from datasets import load_dataset; load_dataset("{name}"' + (f', "{subset}")' if subset else ")")
    return DataError(
        f"{asked} cannot be loaded",
        values=f"{type(error).__name__}: {str(error).strip()[:500]}",
        why="it is neither in the cache nor can the hub give it" if unreachable else "there are no rows to train on",
        fix=f"with a network and HF_HUB_OFFLINE unset, once: python -c '{download}'\n"
        "or copy the cache of a machine that has it (HF_HOME), or check the spelling"
        if unreachable
        else "set task.dataset, task.dataset_config, task.split and task.eval_split to what there is",
    )
