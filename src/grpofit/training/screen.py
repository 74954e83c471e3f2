"""What a reader sees of a run: its state, and that state as rows of text for a given width.

Owns wording, order and what is left out when the terminal is narrow. Must not know how the text reaches a terminal
or a file (`display.py`), nor import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from grpofit.units import GIB, duration, gib, percent

Record = Mapping[str, Any]

_LABEL_CELLS = 10
_ROOMY = 80  # cells after the label from which items stand three cells apart, and less important ones appear
_RECENT = 10  # steps that the rate and the time left are averaged over
_BARS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_MEMORY_WORDS = {"rss": "process", "peak_rss": "peak"}


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What is known before the first step.

    Attributes:
        name: recipe or file name.
        run_dir: where the run writes.
        device: device, threads and torch build in one line; the first line of the run.
        total_steps: steps of the whole run.
        first_step: the step that comes next; above 1 after a resume.
        notes: further lines to show once: model, task, warnings.
        past: records of a resumed run up to its checkpoint, so that curves continue.
    """

    name: str
    run_dir: Path
    device: str
    total_steps: int
    first_step: int = 1
    notes: Sequence[str] = ()
    past: Sequence[Record] = ()


class Phase(NamedTuple):
    """What is being done right now. `done` of `total` is None where it cannot be counted."""

    name: str
    done: int | None
    total: int | None
    unit: str
    started: float


class Checkpoint(NamedTuple):
    """The last one written: after which step, when, how long it took, how large it is."""

    step: int
    at: float
    seconds: float
    n_bytes: int


@dataclass(slots=True)
class State:
    """Everything the rows are made of. Lists are only appended to, so that a drawing thread may read them."""

    header: RunHeader
    clock: Callable[[], float] = time.monotonic
    latest: Record = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    phase: Phase | None = None
    library_bar: str = ""
    saved: Checkpoint | None = None
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for record in self.header.past:
            self._remember(record)
        self.arrivals.append(self.clock())

    def add(self, record: Record) -> None:
        """Take a record of metrics: of a step, of an evaluation, or both in one."""
        self._remember(record)
        if "step_time" in record:
            self.step_seconds.append(record["step_time"])
            self.arrivals.append(self.clock())

    def _remember(self, record: Record) -> None:
        if held_out(record) is not None:
            self.evaluations.append(record)
        if "reward" in record:
            self.latest = record
        if record.get("reward") is not None:  # it is None where no reward applied
            self.rewards.append(record["reward"])
        if math.isfinite(entropy := record.get("entropy") or math.nan):
            self.entropies.append(entropy)

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.latest.get("step", self.header.first_step - 1))

    def seconds_left(self) -> float | None:
        """Estimate over the last steps, with what lies between them (evaluation, checkpoints); None before any, and
        after the last."""
        recent = self.arrivals[-_RECENT - 1 :]
        if len(recent) < 2 or self.step >= self.header.total_steps:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (self.header.total_steps - self.step)


class Item(NamedTuple):
    """A label and its value, the value in forms from wide to narrow."""

    label: str
    forms: Sequence[str]


def printable(text: str) -> str:
    """`text` on one line: what a terminal would act on (control characters, bidi marks) as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def sparkline(values: Sequence[float], width: int = 8) -> str:
    """The whole series in at most `width` bars, each the mean of its part; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    n = min(width, len(values))
    edges = [len(values) * i // n for i in range(n + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    low, spread = min(means), max(means) - min(means)
    return "".join(_BARS[round((m - low) / spread * 7)] if spread > 0 else _BARS[3] for m in means)


def bar(done: float, total: float, width: int) -> str:
    """A progress bar of `width` cells, in eighths of a cell."""
    eighths = round(8 * width * min(1.0, done / total)) if total else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width, "░")


def held_out(record: Record) -> float | None:
    """Accuracy of an evaluation, or its mean reward where no reward knows what is correct; None for other records."""
    value: float | None = record.get("eval/accuracy", record.get("eval/reward"))
    return value


def held_out_text(record: Record) -> str:
    """`0.74 ±0.04`, from the Wilson interval; a mean reward has none."""
    text = f"{held_out(record):.2f}"
    low, high = record.get("eval/accuracy_low"), record.get("eval/accuracy_high")
    return text if low is None or high is None else f"{text} ±{(high - low) / 2:.2f}"


def step_line(state: State) -> str:
    """One plain line for the latest step."""
    r, total = state.latest, state.header.total_steps
    parts = [f"step {state.step}/{total}"]
    if state.evaluations:
        parts.append(f"held-out {held_out(state.evaluations[-1]):.2f}")
    if (reward := r.get("reward")) is not None:
        parts.append(f"reward {reward:.2f}")
    if (flat := r.get("frac_reward_zero_std")) is not None:
        parts.append(f"signal {percent(1 - flat)}")
    if (length := r.get("completions/mean_length")) is not None:
        parts.append(f"len {length:.0f}")
    if (clipped := r.get("completions/clipped_ratio")) is not None:
        parts.append(f"trunc {percent(clipped)}")
    if (seconds := r.get("step_time")) is not None:
        parts.append(f"{seconds:.1f} s")
    sizes = _memory_gib(r)
    parts += [f"{word} {sizes[word]:.1f} GiB" for word in ("process", "reserved") if word in sizes]
    if (left := state.seconds_left()) is not None:
        parts.append(f"left {_rough(left)}")
    return " ".join(parts)


def evaluation_line(record: Record) -> str:
    """One plain line for an evaluation."""
    correct = record.get("eval/accuracy")
    parts = [f"held-out {'' if correct is not None else 'reward '}{held_out_text(record)}"]
    if correct is not None and (n := record.get("eval/n")) is not None:
        parts.append(f"({round(correct * n)} of {n})")
    if (step := record.get("step")) is not None:
        parts.append(f"after step {step}" if step else "before training")
    return " ".join(parts)


def phase_line(phase: Phase, now: float) -> str:
    """What is being done, how far it is where that can be counted, and for how long."""
    parts = [phase.name]
    if phase.done is not None and phase.total is not None and phase.total > 1:
        parts.append(f"{phase.done:,}/{phase.total:,} {phase.unit}".rstrip())
    return f"{' '.join(parts)} · {now - phase.started:.0f} s"


def rows(state: State, width: int, *, over: bool = False) -> list[Text]:
    """The live screen, each row at most `width` cells. Rows without data are left out.

    Args:
        over: the run has ended: leave out what is being done now.
    """
    inner = width - _LABEL_CELLS - 1
    named = [
        ("learning", fit(_learning(state, inner), inner)),
        ("rollouts", _rollouts(state.latest, inner)),
        ("seconds", fit(_seconds(state.latest), inner)),
        ("GiB", fit(_memory(state.latest), inner)),
        ("health", fit(_health(state), inner)),
        ("now", Text() if over else _now(state, inner)),
    ]
    lines = [_title(state, width - 1)]
    lines += [Text.assemble((f" {label:<{_LABEL_CELLS - 1}}", "cyan"), text) for label, text in named if text.plain]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def fit(items: Sequence[Item], width: int) -> Text:
    """Items on one line. Where they do not fit, values take narrower forms, the last item first; then items drop.

    The first item stays, even where it is wider than `width`.
    """
    level = [0] * len(items)
    shown = len(items)

    def text() -> Text:
        pairs = list(zip(items, level, strict=True))[:shown]
        return Text(gap(width)).join(
            Text.assemble((item.label, "dim"), " " if item.label else "", item.forms[n]) for item, n in pairs
        )

    while (line := text()).cell_len > width and (shown > 1 or level[0] + 1 < len(items[0].forms)):
        narrower = [i for i in range(shown) if level[i] + 1 < len(items[i].forms)]
        if narrower:
            level[narrower[-1]] += 1
        else:
            shown -= 1
    return line


def gap(width: int) -> str:
    """What stands between two items."""
    return "   " if width >= _ROOMY else "  "


def _title(state: State, width: int) -> Text:
    header = state.header
    short = str(header.run_dir) if header.name in header.run_dir.name else header.name
    items = [
        Item("", [f"{header.name} → {header.run_dir}", short]),
        Item("step", [f"{state.step}/{header.total_steps}"]),
    ]
    if state.step_seconds:
        items.append(Item("", [f"{_short(fmean(state.step_seconds[-_RECENT:]))} s/step"]))
    if (left := state.seconds_left()) is not None:
        items.append(Item("", [f"{_rough(left)} left"]))
    items.append(Item("", [bar(state.step, header.total_steps, cells) for cells in (20, 14, 8)]))
    line = Text(" ") + fit(items, width - 1)
    line.stylize("bold")
    return line


def _learning(state: State, width: int) -> list[Item]:
    items = []
    if state.evaluations:
        first, last = state.evaluations[0], state.evaluations[-1]
        short = held_out_text(last) if first is last else f"{held_out(first):.2f} → {held_out_text(last)}"
        items.append(Item("held-out", [f"{short} (step {last.get('step', 0)})", short]))
    if state.rewards:
        now = f"{state.rewards[-1]:.2f}"
        items.append(Item("reward", [f"{now} {sparkline(state.rewards, n)}".rstrip() for n in (8, 5)]))
    if (flat := state.latest.get("frac_reward_zero_std")) is not None:
        items.append(Item("signal", [f"{percent(1 - flat)} of groups", percent(1 - flat)]))
    if state.entropies and width >= _ROOMY:
        now = f"{state.entropies[-1]:.2f}"
        items.append(Item("entropy", [f"{now} {sparkline(state.entropies)}".rstrip(), now]))
    return items


def _rollouts(record: Record, width: int) -> Text:
    items = []
    if (length := record.get("completions/mean_length")) is not None:
        items.append(Item("length", [f"{length:.0f}"]))
    if (clipped := record.get("completions/clipped_ratio")) is not None:
        items.append(Item("truncated", [percent(clipped)]))
    line = fit(items, width)
    sample = record.get("sample")
    if not sample:
        return line
    k, group_size = sample["group_correct"], sample["group_size"]
    verdict = f"{sample['reward']:.3g} {sample['reason']}" if sample["reward"] is not None else str(sample["reason"])
    for ending in (f"{verdict}, {k} of {group_size} in its group", f"{verdict}, {k}/{group_size}"):
        before = gap(width) if line.plain else ""
        room = width - line.cell_len - cell_len(before + 'sample "" ' + ending)
        if room >= min(16, cell_len(printable(sample["completion"]))):
            shown = _tail(printable(sample["completion"].strip()), room)
            return Text.assemble(line, before, ("sample", "dim"), f' "{shown}" {ending}')
    return line


def _tail(text: str, cells: int) -> str:
    """The end of `text`, where the answer is, in at most `cells` cells."""
    if cell_len(text) <= cells:
        return text
    text = text[-cells:]
    while cell_len(text) > cells - 1:
        text = text[1:]
    return "…" + text


def _seconds(record: Record) -> list[Item]:
    names = [key for key in record if key.startswith("time/") and record[key] is not None]
    items = [Item(key.removeprefix("time/").removesuffix("_s"), [_short(record[key])]) for key in names]
    if (changed := record.get("weights_changed_frac")) is not None:
        items.append(Item("weights changed", [percent(changed)]))
    if (norm := record.get("grad_norm")) is not None:
        items.append(Item("grad", [f"{norm:.2g}"]))
    return items


def _memory(record: Record) -> list[Item]:
    return [Item(word, [f"{size:.2f}"]) for word, size in _memory_gib(record).items()]


def _memory_gib(record: Record) -> dict[str, float]:
    """The record's memory figures in GiB, under the words shown; zero means that it could not be read."""
    sizes = {}
    for key, value in record.items():
        name, _, unit = key.removeprefix("memory/").rpartition("_")
        if key.startswith("memory/") and unit in ("bytes", "gib") and value:
            sizes[_MEMORY_WORDS.get(name, name)] = value / GIB if unit == "bytes" else value
    return sizes


def _health(state: State) -> list[Item]:
    count = len(state.warnings)
    counted = "1 warning" if count == 1 else f"{count} warnings, the last"
    items = [Item("", [f"{counted}: {state.warnings[-1]}" if count else "ok"])]
    ending = "Ctrl-C saves and stops"
    if state.saved:
        ago = _rough(state.clock() - state.saved.at)
        items.append(Item("checkpoint", [f"step {state.saved.step}, {ago} ago", f"step {state.saved.step}"]))
        cost = f"{gib(state.saved.n_bytes)}, ~{state.saved.seconds:.0f} s"
        items.append(Item("", [f"Ctrl-C saves ({cost}) and stops", ending]))
    else:
        items.append(Item("", [ending]))
    return items


def _now(state: State, width: int) -> Text:
    phase, now = state.phase, state.clock()
    spin = _SPINNER[int(now * 4) % len(_SPINNER)]
    if phase is None:  # shown all the same, so that the screen does not jump
        return Text(f"{spin} step {state.step + 1}")
    items = [Item("", [f"{spin} {phase_line(phase, now)}"])]
    if state.library_bar:
        items.append(Item("", [state.library_bar, state.library_bar[: width // 2]]))
    elif phase.done is not None and phase.total is not None and phase.total > 1:
        items.append(Item("", [bar(phase.done, phase.total, 20), bar(phase.done, phase.total, 8)]))
    return fit(items, width)


def _short(seconds: float) -> str:
    """`0.04`, `5.1`, `35.2`, `240`."""
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def _rough(seconds: float) -> str:
    """A duration in whole seconds."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)
