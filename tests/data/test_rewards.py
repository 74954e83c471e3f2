"""The built-in rewards as pure functions, against values worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.data.rewards import (
    Case,
    ReferenceUnusable,
    answer_format,
    last_boxed,
    last_number,
    make_builtin,
    math_answer,
    regex,
    soft_overlong,
    tagged_answer,
    task,
)
from grpofit.types import Reason, Score


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("12", "12"),
        ("The answer is 12.", "12"),
        ("7 + 5 = 12", "12"),
        ("12.0", "12"),
        ("12", "12.00"),
        ("It costs $1,234.50 in all.", "1234.5"),
        ("1,234,567", "1234567"),
        ("-5", "-5"),
        ("x = -5", "-5"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("minus sign: −5", "-5"),
        ("a range of 10-15", "15"),
        ("(3)-4", "4"),
        ("7 - 5", "5"),
        ("x-3", "3"),
        ("\\boxed{12}", "12"),
        ("**12**", "12"),
        ("it is .5", "0.5"),
        ("see No.5", "5"),
        ("3.14", "3.14"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("2024,123", "123"),
        ("50%", "50"),
        ("72 clips", "Natalia sold 48 + 24 = 72\n#### 72"),
        ("9" * 5000, "9" * 5000),
        ("007", "7"),
        ("-0", "0"),
    ],
)
def test_last_number_finds_it(completion, answer):
    assert last_number(completion, answer).reason is Reason.CORRECT
    assert last_number(completion, answer).value == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("12 or 13", "12"), ("-12", "12"), ("12.1", "12"), ("1/2", "0.5"), ("1,000", "1"), ("120", "12")],
)
def test_last_number_wrong(completion, answer):
    score = last_number(completion, answer)
    assert (score.value, score.reason) == (0.0, Reason.WRONG)


def test_last_number_reasons():
    assert last_number("no idea", "12").reason is Reason.NO_ANSWER
    assert last_number("", "12") == Score(0.0, Reason.NO_ANSWER)
    assert last_number("it is 11", "12", truncated=True).reason is Reason.TRUNCATED
    assert last_number("no idea", "12", truncated=True).reason is Reason.TRUNCATED
    assert last_number("it is 12", "12", truncated=True).reason is Reason.CORRECT


@pytest.mark.parametrize("answer", [None, "blue", ""])
def test_last_number_without_a_reference(answer):
    with pytest.raises(ReferenceUnusable):
        last_number("12", answer)


@given(st.integers(-(10**12), 10**12))
@settings(max_examples=100, deadline=None)
def test_last_number_reads_every_integer(number):
    for text in (f"so {number}.", f"so {number:,}.", f"= {number}", f"**{number}**", f"${number}$"):
        assert last_number(text, str(number)).reason is Reason.CORRECT, text
    assert last_number(f"so {number + 1}.", str(number)).reason is Reason.WRONG


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_last_number_never_raises_on_a_completion(text):
    assert last_number(text, "3").reason in (Reason.CORRECT, Reason.WRONG, Reason.NO_ANSWER)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{12}", "12"),
        ("The answer is 12.", "12"),
        ("\\boxed{\\frac12}", "0.5"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("\\boxed{2\\pi}", "2\\pi"),
        ("\\boxed{1+x^2}", "$x^2+1$"),
        ("\\boxed{1+x^2}", "x^2+1"),
        ("\\boxed{1,234}", "1234"),
        ("\\boxed{2, 1}", "1,2"),
        ("\\boxed{\\text{A}}", "A"),
        ("\\boxed{3} no, \\boxed{7}", "7"),
        ("\\boxed{7} and then 8, 9", "7"),
        ("\\boxed{7}", "so it is \\boxed{7}"),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}"),
    ],
)
def test_math_answer_correct(completion, answer):
    assert math_answer(completion, answer).reason is Reason.CORRECT


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{7} no, \\boxed{3}", "7"),
        ("\\boxed{2}", "2\\pi"),
        ("\\boxed{3}", "3\\sqrt{2}"),
        ("7 \\boxed{8}", "7"),
        ("\\boxed{1/3}", "0.5"),
    ],
)
def test_math_answer_wrong(completion, answer):
    assert math_answer(completion, answer).reason is Reason.WRONG


def test_math_answer_reasons():
    assert math_answer("I do not know", "7").reason is Reason.NO_ANSWER
    assert math_answer("\\boxed{}", "7").reason is Reason.NO_ANSWER
    assert math_answer("\\boxed{8}", "7", truncated=True).reason is Reason.TRUNCATED
    with pytest.raises(ReferenceUnusable):
        math_answer("\\boxed{8}", None)
    with pytest.raises(ReferenceUnusable):
        math_answer("\\boxed{8}", "")


def test_last_boxed():
    assert last_boxed("\\boxed{a{b}c}") == "a{b}c"
    assert last_boxed("\\boxed{1} \\boxed{2") == "1"
    assert last_boxed("\\boxed {1}, \\fbox{2}") == "2"
    assert last_boxed("boxed{1}") is None


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("Answer: 12", 1.0),
        ("12 is the ANSWER:", 1.0),
        ("answer: twelve", 0.7),
        ("12", 0.2),
        ("the answer is 12", 0.2),
        ("", 0.2),
    ],
)
def test_answer_format(completion, value):
    assert answer_format(completion) == Score(value, Reason.SCORED)


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)]
)
def test_soft_overlong_is_equation_13(tokens, value):
    """Hand-computed for a limit of 100 and a buffer of 20: (80 - tokens) / 20 in the ramp."""
    assert soft_overlong(tokens, 100, 20).value == pytest.approx(value, abs=1e-12)


def test_soft_overlong_equals_trl():
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=37, soft_punish_cache=11)
    for tokens in range(45):
        assert soft_overlong(tokens, 37, 11).value == pytest.approx(theirs([[0] * tokens])[0])


def test_regex():
    assert regex("<think>a</think>", r"<think>.*</think>").value == 1.0
    assert regex("<think>a", r"<think>.*</think>").value == 0.0


def test_tagged_answer():
    assert tagged_answer(" 12 \n") == "12"
    assert tagged_answer("<think>1</think><answer>3</answer> <answer> 4\n</answer>.") == "4"
    assert tagged_answer("<answer>3") == "<answer>3"


def test_task_scorer():
    def scorer(answer: str) -> float:
        return {"12": 1.0, "about 12": 0.5}[answer]

    assert task("<answer>12</answer>", scorer) == Score(1.0, Reason.CORRECT, "12")
    assert task("about 12", scorer) == Score(0.5, Reason.WRONG, "about 12")
    assert task("about 12", scorer, truncated=True).reason is Reason.TRUNCATED
    assert task("", scorer).reason is Reason.NO_ANSWER
    raised = task("junk", scorer)
    assert (raised.value, raised.reason) == (0.0, Reason.WRONG)
    assert "KeyError" in raised.detail


def test_make_builtin_passes_what_each_needs():
    case = Case("12", tokens=9, truncated=False, columns={"answer": "12"})
    assert make_builtin({"name": "last_number"})(case).value == 1.0
    assert make_builtin({"name": "math_answer"})(case).value == 1.0
    assert make_builtin({"name": "answer_format"})(case).value == 0.2
    spec = {"name": "soft_overlong", "max_completion_tokens": 10, "buffer_tokens": 2}
    assert make_builtin(spec)(case).value == -0.5
    assert make_builtin({"name": "regex", "pattern": "1."})(case).value == 1.0


def test_rewards_import_no_torch_and_no_configuration():
    code = (
        "import sys, grpofit.data.rewards, grpofit.data.worker, grpofit.data.functions;"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'transformers', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
