"""The displays: what stands where at a given width, that nothing a model writes breaks a terminal, and the log."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from grpofit.training.curve import moving_average, plot_learning
from grpofit.training.display import LiveDisplay, PlainDisplay, open_display, report
from grpofit.training.screen import (
    Phase,
    RunHeader,
    State,
    bar,
    evaluation_line,
    phase_line,
    printable,
    rows,
    sparkline,
    step_line,
)

GIB = 1024**3
HEADER = RunHeader("qwen2.5-math-1.5b-24gb", Path("runs/latest"), "cpu, 2 threads, torch 2.13.0", 200)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def evaluation(step: int, value: float, half: float = 0.04) -> dict:
    return {
        "step": step,
        "eval/accuracy": value,
        "eval/accuracy_low": value - half,
        "eval/accuracy_high": value + half,
        "eval/n": 200,
    }


def record(step: int, **changes) -> dict:
    return {
        "step": step,
        "reward": step / 100,
        "frac_reward_zero_std": 0.42,
        "completions/mean_length": 312.4,
        "completions/clipped_ratio": 0.04,
        "entropy": 1 / step,
        "grad_norm": 0.2134,
        "step_time": 35.2,
        "time/rollout_s": 22.1,
        "time/reward_s": 0.04,
        "time/backward_s": 10.9,
        "time/update_s": 1.6,
        "weights_changed_frac": 0.34,
        "memory/rss_bytes": 7 * GIB,
        "memory/allocated_gib": 19.7,
        "memory/reserved_gib": 20.4,
        "sample": {
            "completion": "48/2 = 24,\n48 + 24 = \\boxed{72}",
            "reward": 1.0,
            "reason": "correct",
            "group_correct": 5,
            "group_size": 8,
        },
        **changes,
    }


def running(clock: Clock, steps: int = 20, **changes) -> State:
    state = State(HEADER, clock)
    state.add(evaluation(0, 0.61))
    for step in range(1, steps + 1):
        clock.now += 36.0
        state.add(record(step, **changes))
    state.add(evaluation(steps, 0.74))
    return state


def screen(state: State, width: int) -> list[str]:
    """The rows as a terminal of `width` cells shows them: a row that wraps becomes two."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    for row in rows(state, width):
        console.print(row)
    return console.file.getvalue().splitlines()


def test_wide_screen():
    clock = Clock()
    state = running(clock)
    assert screen(state, 140) == [
        " qwen2.5-math-1.5b-24gb → runs/latest   step 20/200   35.2 s/step   1 h 48 min left   ██░░░░░░░░░░░░░░░░░░",
        " learning held-out 0.61 → 0.74 ±0.04 (step 20)   reward 0.20 ▁▂▃▄▅▆▇█   "
        "signal 58% of groups   entropy 0.05 █▃▂▂▁▁▁▁",
        " rollouts length 312   truncated 4%   "
        'sample "48/2 = 24,\\n48 + 24 = \\boxed{72}" 1 correct, 5 of 8 in its group',
        " seconds  rollout 22.1   reward 0.04   backward 10.9   update 1.6   weights changed 34%   grad 0.21",
        " GiB      process 7.00   allocated 19.70   reserved 20.40",
        " health   ok   Ctrl-C saves and stops",
        " now      ⠋ step 21",
    ]


def test_narrow_screen_keeps_what_matters_most():
    lines = screen(running(Clock()), 80)
    assert lines[0].startswith(" qwen2.5-math-1.5b-24gb  step 20/200  35.2 s/step  1 h 48 min left")
    assert lines[1] == " learning held-out 0.61 → 0.74 ±0.04 (step 20)  reward 0.20 ▁▃▄▆█  signal 58%"
    assert lines[2].endswith('boxed{72}" 1 correct, 5/8')
    assert len(lines) == 7


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 81, 100, 140, 250])
def test_no_row_is_wider_than_the_terminal(width):
    clock = Clock()
    state = running(clock)
    state.warnings.append("step 3: the loss is not finite, the step was skipped; worst rollout: row 17, sample 2")
    state.phase = Phase("rollout", 640, 1536, "tokens", 0.0)
    assert len(screen(state, width)) == 7
    assert all(cell_len(line) <= width for line in screen(state, width))


@given(st.text(max_size=80), st.integers(40, 160))
@settings(max_examples=100, deadline=None)
def test_no_completion_breaks_the_screen(completion, width):
    state = running(Clock(), steps=1, sample={**record(1)["sample"], "completion": completion})
    lines = screen(state, width)
    assert len(lines) == 7
    assert all(cell_len(line) <= width for line in lines)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for line in lines for c in line)


def test_control_characters_and_markup_are_shown_as_they_are():
    assert printable("a\x1b[31mb\r\n\tc\u202e[bold]x[/]") == r"a\x1b[31mb\r\n\tc\u202e[bold]x[/]"
    assert printable("über 数字 \ud800") == r"über 数字 \ud800"


def test_missing_keys_are_not_shown():
    state = State(HEADER, Clock())
    assert screen(state, 100)[1:] == [" health   ok   Ctrl-C saves and stops", " now      ⠋ step 1"]
    state.add({"step": 1, "reward": 0.5})
    assert screen(state, 100)[1:-2] == [" learning reward 0.50"]


def test_a_step_without_any_reward():
    state = running(Clock())
    state.add(record(21, reward=None))
    assert step_line(state).startswith("step 21/200 held-out 0.74 signal 58%")
    assert "reward 0.20 ▁" in screen(state, 140)[1]


def test_a_resumed_run_continues_its_curves():
    past = [evaluation(0, 0.3), *(record(step) for step in range(1, 6)), evaluation(5, 0.5)]
    header = RunHeader("n", Path("r"), "cpu", 10, first_step=6, past=past)
    state = State(header, Clock())
    assert state.step == 5
    assert state.seconds_left() is None
    assert screen(state, 140)[1].startswith(" learning held-out 0.30 → 0.50 ±0.04 (step 5)   reward 0.05 ▁▃▄▆█")


def test_time_left_counts_what_lies_between_steps():
    clock = Clock()
    state = running(clock, steps=4)  # 36 s each, of which 35.2 are the step
    assert state.seconds_left() == pytest.approx(36.0 * 196)
    state.add(record(200))
    assert state.seconds_left() is None


def test_held_out_reward_where_nothing_is_correct_or_wrong():
    state = State(HEADER, Clock())
    state.add({"step": 0, "eval/reward": 0.25, "eval/n": 50})
    state.add(record(1))
    assert evaluation_line(state.evaluations[0]) == "held-out reward 0.25 before training"
    assert "held-out 0.25 reward 0.01" in step_line(state)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([], ""),
        ([1.0], ""),
        ([0.0, 1.0], "▁█"),
        ([2.0, 2.0, 2.0], "▄▄▄"),
        ([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], "▁▅█"),
        ([0.0, 7.0, 1.0, 6.0, 2.0], "▁██"),  # parts of one, two and two values: 0, 4, 4
    ],
)
def test_sparkline(values, expected):
    assert sparkline(values, 3) == expected


@pytest.mark.parametrize(
    "done, total, expected",
    [(0, 8, "░░░░"), (4, 8, "██░░"), (8, 8, "████"), (1, 32, "▏░░░"), (3, 8, "█▌░░"), (9, 8, "████"), (0, 0, "░░░░")],
)
def test_bar(done, total, expected):
    assert bar(done, total, 4) == expected


def test_phase_line():
    assert phase_line(Phase("rollout", 640, 1536, "tokens", 10.0), 22.4) == "rollout 640/1,536 tokens · 12 s"
    assert phase_line(Phase("evaluating", 120, 200, "", 0.0), 3.0) == "evaluating 120/200 · 3 s"
    assert phase_line(Phase("update", 0, 1, "", 0.0), 3.0) == "update · 3 s"
    assert phase_line(Phase("loading smollm2-135m", None, None, "", 0.0), 3.0) == "loading smollm2-135m · 3 s"


def log_lines(path: Path) -> list[str]:
    lines = path.read_text("utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    return [line[20:] for line in lines]


def drive(display, clock: Clock) -> None:
    """A short run."""
    display.start(HEADER)
    display.phase("loading", None, None)
    display.evaluation(evaluation(0, 0.61))
    for step in (1, 2):
        display.phase("rollout", 10, 64, "tokens")
        clock.now += 36
        display.step(record(step))
    display.checkpoint(2, 1.5, 3 * GIB)
    display.event("reward: [red]failed[/]\x1b[2J\nrow 7", warning=True)
    display.finish({"steps": 2, "wall_s": 72.0, "accuracy_start": 0.61, "accuracy_end": 0.74, "eval_n": 200})
    display.close()


EXPECTED = [
    "cpu, 2 threads, torch 2.13.0",
    "qwen2.5-math-1.5b-24gb → runs/latest   200 steps",
    "held-out 0.61 ±0.04 (122 of 200) before training",
    "step 1/200 held-out 0.61 reward 0.01 signal 58% len 312 trunc 4% 35.2 s process 7.0 GiB reserved 20.4 GiB "
    "left 1 h 59 min",
    "step 2/200 held-out 0.61 reward 0.02 signal 58% len 312 trunc 4% 35.2 s process 7.0 GiB reserved 20.4 GiB "
    "left 1 h 58 min",
    "reward: [red]failed[/]\\x1b[2J",
    "row 7",
    "",
    "trained   2 of 200 steps in 1 min 12 s",
    "learned   held-out accuracy 0.61 → 0.74 (n = 200)",
    "files     runs/latest",
]


def test_plain_display(tmp_path):
    clock, stream = Clock(), io.StringIO()
    drive(PlainDisplay(tmp_path / "train.log", stream, clock), clock)
    assert stream.getvalue().splitlines() == EXPECTED
    log = log_lines(tmp_path / "train.log")
    assert log.pop(5) == "checkpoint after step 2: 3.00 GiB in 1.5 s"
    assert log == EXPECTED


def test_live_display_draws_rows_and_logs_the_same_lines(tmp_path):
    clock = Clock()
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system=None)
    drive(LiveDisplay(tmp_path / "train.log", console, clock), clock)
    shown = console.file.getvalue()
    assert "reward: [red]failed[/]\\x1b[2J" in shown
    assert "\x1b[2J" not in shown
    assert " health   1 warning: reward: [red]failed[/]\\x1b[2J" in shown
    assert "learned   held-out accuracy 0.61 → 0.74" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor was hidden and is back
    log = log_lines(tmp_path / "train.log")
    assert log.pop(5).startswith("checkpoint")
    assert log == EXPECTED


def test_progress_bars_of_libraries_appear_in_the_row_now(tmp_path):
    from tqdm import tqdm

    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system=None)
    before = sys.stderr
    with LiveDisplay(tmp_path / "train.log", console, Clock()) as display:
        display.start(HEADER)
        display.phase("loading model")
        with tqdm(total=4, desc="converting", mininterval=0, miniters=1) as bar:
            bar.update(2)
            assert "loading model · 0 s   converting:  50%|" in screen(display._running, 100)[-1]
        assert "converting" not in "".join(screen(display._running, 100))
        print("a warning of a library", file=sys.stderr)
    assert sys.stderr is before
    shown = console.file.getvalue()
    assert shown.count("converting") <= shown.count("now")  # in the row and nowhere else
    assert "a warning of a library\n" in shown


def test_the_log_of_a_resumed_run_is_appended(tmp_path):
    for _ in range(2):
        clock = Clock()
        drive(PlainDisplay(tmp_path / "train.log", io.StringIO(), clock), clock)
    assert log_lines(tmp_path / "train.log").count("qwen2.5-math-1.5b-24gb → runs/latest   200 steps") == 2


def test_plain_display_shows_life_in_a_slow_step(tmp_path):
    clock, stream = Clock(), io.StringIO()
    with PlainDisplay(tmp_path / "train.log", stream, clock) as display:
        display.start(HEADER)
        for done in range(0, 100, 10):
            clock.now += 10
            display.phase("rollout", done, 100, "tokens")
    assert stream.getvalue().splitlines()[2:] == [
        "step 1/200 rollout 20/100 tokens · 20 s",
        "step 1/200 rollout 50/100 tokens · 50 s",
        "step 1/200 rollout 80/100 tokens · 80 s",
    ]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    read, write = os.pipe()
    os.close(read)
    clock = Clock()
    with open(write, "w") as stream:
        drive(PlainDisplay(tmp_path / "train.log", stream, clock), clock)
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # so that closing has somewhere to flush to
    assert log_lines(tmp_path / "train.log")[-1] == "files     runs/latest"


def test_a_stream_that_is_not_utf8(tmp_path):
    clock = Clock()
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    drive(PlainDisplay(tmp_path / "train.log", stream, clock), clock)
    stream.seek(0)
    assert "qwen2.5-math-1.5b-24gb \\u2192 runs/latest" in stream.read()


SCRIPT = """
    import sys
    from pathlib import Path
    from grpofit.training.display import RunHeader, open_display
    with open_display(Path(sys.argv[1])) as display:
        print(type(display).__name__)
        display.start(RunHeader("n", Path("r"), "cpu", 3))
        display.phase("rollout", 1, 2)
        raise SystemExit("stopped")
"""


def run_in_terminal(log: Path, term: str) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(log)]
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": term}, close_fds=True)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert child.wait(timeout=30) == 1
    return shown.decode()


def test_live_in_a_terminal_and_given_back_after_an_exception(tmp_path):
    shown = run_in_terminal(tmp_path / "train.log", "xterm")
    assert "LiveDisplay" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.rstrip().endswith("stopped")


def test_plain_in_a_terminal_that_cannot_redraw(tmp_path):
    shown = run_in_terminal(tmp_path / "train.log", "dumb")
    assert "PlainDisplay" in shown and "\x1b" not in shown


def test_plain_where_there_is_no_terminal(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "train.log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["PlainDisplay", "cpu", "n → r   3 steps"]


def test_plain_when_asked(tmp_path):
    with open_display(tmp_path / "a.log", plain=True) as display:
        assert isinstance(display, PlainDisplay)
    with open_display(tmp_path / "b.log", plain=False) as display:
        assert isinstance(display, LiveDisplay)


def test_report_with_everything():
    summary = {
        "steps": 12,
        "wall_s": 372.0,
        "step_s_median": 5.04,
        "accuracy_start": 0.36,
        "accuracy_end": 0.86,
        "accuracy_end_low": 0.804,
        "accuracy_end_high": 0.901,
        "eval_n": 200,
        "peak_rss_bytes": 3 * GIB,
    }
    example = {"prompt": "What is 13 + 9?\n", "answer": "22", "before": "It is\x07 23.", "after": "22"}
    assert report(summary, HEADER, [example]) == [
        "",
        "trained   12 of 200 steps in 6 min 12 s, median 5.0 s a step",
        "learned   held-out accuracy 0.36 → 0.86 (95%: 0.80 to 0.90, n = 200)",
        "memory    peak of the process 3.00 GiB",
        "example   What is 13 + 9?   (answer 22)",
        '  before  "It is\\x07 23."',
        '  after   "22"',
        "files     runs/latest",
    ]


def test_report_where_nothing_is_correct_or_wrong():
    summary = {"steps": 3, "step_s_median": None, "accuracy_start": None, "accuracy_end": None}
    rewards = {"eval_reward_start": 0.1, "eval_reward_end": 0.25, "eval_n": 50}
    assert report(summary, HEADER) == ["", "trained   3 of 200 steps", "files     runs/latest"]
    assert report(summary | rewards, HEADER)[2] == "learned   held-out reward 0.10 → 0.25 (n = 50)"


def test_moving_average():
    assert moving_average([1.0, 2.0, 3.0, 6.0], window=2) == [1.0, 1.5, 2.5, 4.5]
    assert moving_average([], window=2) == []


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [evaluation(0, 0.4)],
        [record(1)],
        [{"step": 0, "eval/reward": 0.1, "eval/n": 9}, record(1, reward=None), record(2)],
        [evaluation(0, 0.4), *(record(step) for step in range(1, 30)), evaluation(29, 1.0)],
        [{**evaluation(0, 0.0), "eval/accuracy_low": 1e-17}, {**evaluation(1, 1.0), "eval/accuracy_high": 1 - 1e-16}],
    ],
)
def test_curve_is_a_picture_800_pixels_wide(tmp_path, metrics):
    path = tmp_path / "learning.png"
    plot_learning(metrics, path, "smollm2-arithmetic")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == 800


def test_curve_shows_the_numbers(tmp_path):
    path = tmp_path / "learning.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_learning([evaluation(0, 0.36), *(record(step) for step in range(1, 30)), evaluation(29, 0.87)], path)
    drawn = path.read_text()
    for text in ("0.36", "0.87", "length (tokens)", "(n = 200)", "mean of the last 10 steps"):
        assert text in drawn
