"""Tasks: training rows and held-out rows that share nothing.

Owns where rows come from and how they are split. Rows are dictionaries of columns, with the reference in `answer`
where there is one. Must not know tokenizers or rewards. Splits depend on `task.split_seed` alone, so that runs with
other seeds are compared on the same held-out rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpofit.config.tree import TaskConfig
from grpofit.data.keyed import hash_order, keyed_rng, stable_hash
from grpofit.data.prompts import check_prompt, prompt_template
from grpofit.data.sources import Row, Table, nearest, read_dataset, read_file
from grpofit.data.templates import RowTemplate
from grpofit.errors import DataError

REASONING_GYM = "reasoning_gym:"
_GENERATED_ROWS = 20_000
_REASONING_GYM_ROWS = 2_000
# Up to here every problem is listed and shuffled; above, problems are drawn until there are enough.
_LISTED_PROBLEMS = 200_000
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows to train on and rows to evaluate on.

    Attributes:
        name: as the user wrote it: the task, the file or the data set.
        notes: what a user should know about the rows, one sentence each; empty when all is as asked.
    """

    name: str
    train: list[Row]
    heldout: list[Row]
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that any training row has."""
        return tuple(dict.fromkeys(column for row in self.train for column in row))


def load_task(config: TaskConfig, base_dir: Path) -> Task:
    """Read or make the rows of a task; relative paths start at `base_dir`.

    Raises:
        DataError: unknown task, unreadable or empty data, a row that gives no prompt, more held-out rows than
            half of what there is.
    """
    if config.file is not None:
        return _from_file(config, base_dir)
    if config.dataset is not None:
        return _from_dataset(config, base_dir)
    name = config.name or ""
    if name == "arithmetic":
        return _arithmetic(config)
    if name == "gsm8k":
        return _gsm8k(config, base_dir)
    if name.startswith(REASONING_GYM):
        return _reasoning_gym(config, name.removeprefix(REASONING_GYM))
    known = ("arithmetic", "gsm8k", "reasoning_gym:<dataset>")
    raise DataError(
        f'unknown task "{name}"',
        values=f"known: {', '.join(known)}",
        why="without a task there are no prompts",
        fix=f"{nearest(name, known)}set task.name to one of these, or task.file or task.dataset to your own rows",
    )


def _finished(config: TaskConfig, table: Table) -> list[Row]:
    """The rows with `answer` filled in, each checked to give a prompt: here a row still has its line number."""
    prompt = prompt_template(config)
    answer = None if config.answer is None else RowTemplate(config.answer, "task.answer")
    rows = []
    for index, row in enumerate(table.rows):
        where = table.where(index)
        if answer is not None:
            row = {**row, "answer": answer.render(row, where)}
        check_prompt(row, prompt, where)
        rows.append(row)
    return rows


def _choose(rows: list[Row], count: int | None, seed: int) -> list[Row]:
    """At most `count` rows, chosen by their content, in the order they came in."""
    if count is None or count >= len(rows):
        return rows
    return [rows[index] for index in sorted(index for _, index in hash_order(rows, seed)[:count])]


def _too_many_heldout(eval_size: int, existing: int, what: str, other: str) -> DataError:
    return DataError(
        f"task.eval_size {eval_size} is more than half of the {what}",
        values=f"{existing} {what}, {eval_size} of them held out",
        why="too few would be left to train on, and held-out rows must never be trained on",
        fix=f"--set task.eval_size={max(1, existing // 4)}, or {other}",
    )


def _split(config: TaskConfig, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Held-out rows by hash of content: a row keeps its side when others are added, and copies share a side."""
    copies: dict[int, list[int]] = {}
    for key, index in hash_order(rows, config.split_seed):
        copies.setdefault(key, []).append(index)
    if 2 * config.eval_size > len(copies):
        raise _too_many_heldout(config.eval_size, len(copies), "different rows", "name held-out rows of their own")
    places = list(copies.values())
    heldout = sorted(indices[0] for indices in places[: config.eval_size])
    train = sorted(index for indices in places[config.eval_size :] for index in indices)
    return _choose([rows[index] for index in train], config.train_size, config.split_seed), [rows[i] for i in heldout]


def _given_heldout(config: TaskConfig, name: str, train: list[Row], heldout: list[Row], asked: str) -> Task:
    """A task whose held-out rows the user named."""
    notes = []
    trained = {stable_hash(row) for row in train}
    if common := sum(stable_hash(row) in trained for row in heldout):
        notes.append(f"{common} of the {len(heldout)} held-out rows of {asked} are training rows too")
    if len(heldout) < config.eval_size:
        notes.append(f"evaluation uses all {len(heldout)} rows of {asked} (task.eval_size is {config.eval_size})")
    train = _choose(train, config.train_size, config.split_seed)
    return Task(name, train, _choose(heldout, config.eval_size, config.split_seed), tuple(notes))


def _from_file(config: TaskConfig, base_dir: Path) -> Task:
    assert config.file is not None
    rows = _finished(config, read_file(config.file, base_dir, "task.file"))
    if config.eval_file is None:
        return Task(config.file, *_split(config, rows))
    heldout = _finished(config, read_file(config.eval_file, base_dir, "task.eval_file"))
    return _given_heldout(config, config.file, rows, heldout, f'task.eval_file "{config.eval_file}"')


def _from_dataset(config: TaskConfig, base_dir: Path) -> Task:
    assert config.dataset is not None
    name, subset = config.dataset, config.dataset_config
    rows = _finished(config, read_dataset(name, subset, config.split, base_dir))
    if config.eval_split is None:
        return Task(name, *_split(config, rows))
    heldout = _finished(config, read_dataset(name, subset, config.eval_split, base_dir))
    return _given_heldout(config, name, rows, heldout, f'split "{config.eval_split}"')


def _gsm8k(config: TaskConfig, base_dir: Path) -> Task:
    """GSM8K (Cobbe et al., 2021, arXiv:2110.14168): the number after `####` is the answer, its thousands' commas
    removed; the worked solution stays in `solution`. Held-out rows come from its test split."""

    def rows(split: str) -> list[Row]:
        table = read_dataset("openai/gsm8k", "main", split, base_dir)
        read = [
            {
                "question": row["question"],
                "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
                "solution": row["answer"],
            }
            for row in table.rows
        ]
        return _finished(config, dataclasses.replace(table, rows=read))

    return _given_heldout(config, "gsm8k", rows("train"), rows("test"), "the test split")


def _arithmetic(config: TaskConfig) -> Task:
    """`7 + 5` and its result; no held-out problem is trained on, nor its mirror `5 + 7` where that is the same sum."""
    operations = list(dict.fromkeys(config.operations or ["add"]))
    low, high = config.terms or (1, 20)
    span = max(0, high - low + 1)
    space = len(operations) * span * span
    if 2 * config.eval_size > space:
        raise _too_many_heldout(config.eval_size, space, "problems there are", "widen task.terms")

    def problem(index: int) -> tuple[str, int, int]:
        operation, terms = divmod(index, span * span)
        return operations[operation], low + terms // span, low + terms % span

    wanted = min(config.train_size or _GENERATED_ROWS, space - config.eval_size)
    listed = space <= _LISTED_PROBLEMS or 2 * (wanted + config.eval_size) > space
    order = map(problem, _listed_order(space, config.split_seed) if listed else _drawn_order(space, config.split_seed))
    heldout: list[tuple[str, int, int]] = []
    taken: set[tuple[str, int, int]] = set()
    while len(heldout) < config.eval_size:
        operation, a, b = next(order)
        if (operation, a, b) in taken:
            continue
        twins = {(operation, a, b), (operation, a, b) if operation == "sub" else (operation, b, a)}
        taken |= twins
        heldout += sorted(twins)
    train: list[tuple[str, int, int]] = []
    for item in order:
        if len(train) >= wanted:
            break
        if item not in taken:
            train.append(item)
    made = [_problem_row(*item) for item in train + heldout[: config.eval_size]]
    rows = _finished(config, Table("arithmetic", made, range(1, len(made) + 1)))
    return Task("arithmetic", rows[: len(train)], rows[len(train) :])


def _listed_order(space: int, seed: int) -> Iterator[int]:
    return iter(keyed_rng(seed, space).permutation(space).tolist())


def _drawn_order(space: int, seed: int) -> Iterator[int]:
    """Endless different indices; for spaces of which only a part is wanted."""
    rng, seen = keyed_rng(seed, space), set()
    while True:
        for index in rng.integers(space, size=4096).tolist():
            if index not in seen:
                seen.add(index)
                yield index


def _problem_row(operation: str, a: int, b: int) -> Row:
    answer = a + b if operation == "add" else a - b if operation == "sub" else a * b
    shown = f"({b})" if b < 0 else str(b)
    return {"question": f"{a} {_SIGNS[operation]} {shown}", "answer": str(answer)}


def _reasoning_gym(config: TaskConfig, dataset: str) -> Task:
    """Procedural rows of reasoning_gym. Its items are seeded by `seed + index`, so the two splits start far apart;
    a question that came up before is left out, in training also when it is held out."""
    try:
        import reasoning_gym
    except ImportError:
        raise DataError(
            f'task "{REASONING_GYM}{dataset}" needs the package reasoning_gym',
            values="it is not installed",
            why="it makes the questions and scores the answers",
            fix='pip install "grpofit[reasoning-gym]"',
        ) from None
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        raise DataError(
            f'reasoning_gym has no data set "{dataset}"',
            values=f"{len(known)} there are, among them {', '.join(sorted(known)[:6])}",
            why="without a task there are no prompts",
            fix=f"{nearest(dataset, known)}set task.name to reasoning_gym:<one of them>",
        )
    seen: set[str] = set()
    heldout = _gym_rows(config, dataset, "heldout", config.eval_size, seen)
    wanted = config.train_size or _REASONING_GYM_ROWS
    train = _gym_rows(config, dataset, "train", wanted, seen)
    if len(heldout) < config.eval_size or len(train) < min(wanted, config.eval_size):
        what = f"different questions that {dataset} gave"
        raise _too_many_heldout(config.eval_size, len(seen), what, "make them more varied with task.options")
    name = f"{REASONING_GYM}{dataset}"
    notes = [f"{name} gave {len(train)} different training rows of {wanted} asked"] if len(train) < wanted else []
    made = _finished(config, Table(name, train + heldout, range(1, len(train) + len(heldout) + 1)))
    return Task(name, made[: len(train)], made[len(train) :], tuple(notes))


def _gym_rows(config: TaskConfig, dataset: str, split: str, count: int, seen: set[str]) -> list[Row]:
    import reasoning_gym

    # Twice as many items as wanted, since small data sets repeat themselves.
    seed = stable_hash("reasoning_gym", split, config.split_seed) % 2**31
    rows: list[Row] = []
    try:
        items = reasoning_gym.create_dataset(dataset, seed=seed, size=2 * count, **config.options)
        for index in range(2 * count):
            if len(rows) == count:
                break
            item = items[index]
            if item["question"] not in seen:
                seen.add(item["question"])
                rows.append(dict(item))
    except Exception as error:  # a data set may refuse its options with any exception, at any item
        _, options = reasoning_gym.factory.DATASETS[dataset]
        names = [field.name for field in dataclasses.fields(options) if field.name not in ("seed", "size")]
        raise DataError(
            f"reasoning_gym:{dataset} does not accept task.options",
            values=f"{type(error).__name__}: {error}; options given: {config.options or '(none)'}",
            why="no questions could be made",
            fix=f"options there are: {', '.join(names) or '(none)'}",
        ) from error
    return rows


def reasoning_gym_setup(config: TaskConfig) -> dict[str, Any]:
    """What a reward worker needs to score answers of a reasoning_gym task: data set and options."""
    return {"dataset": (config.name or "").removeprefix(REASONING_GYM), "options": dict(config.options)}
