"""reasoning_gym's scorers, without their habit of running the answer as Python.

Owns how an answer is scored by reasoning_gym inside a reward worker. Some of its scorers pass the model's text to
`eval`, or to sympy's parser, which does the same; here the first reads literals only and the second refuses every
name that is not mathematics. Must be imported in a worker only, since it replaces functions in these libraries.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

# Modules whose scorers call `eval` on the answer, to read a Python list.
EVALUATES_ANSWER = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
_TRIGONOMETRIC = {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
_FUNCTIONS = _TRIGONOMETRIC | {"exp", "log", "ln", "sqrt", "abs", "Abs", "pi", "Integral"}
_NAME = re.compile(r"[^\W\d]\w*")
_PLAIN = re.compile(r"[\w\s+\-*/^().,=]*")


def check_expression(text: str) -> None:
    """Raises ValueError unless `text` has only numbers, operators, single letters and well-known functions."""
    strange = [name for name in _NAME.findall(text) if len(name.rstrip("0123456789")) > 1 and name not in _FUNCTIONS]
    if strange or not _PLAIN.fullmatch(text) or re.search(r"\.\s*[^\W\d]", text):
        raise ValueError(f"not a mathematical expression: {text[:80]!r}")


def make_scorer(dataset: str, options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], float]:
    """`score(answer, row)` of a data set; `row` has its `question`, `answer` and `metadata`."""
    import sympy
    import sympy.parsing.sympy_parser as parser

    original = parser.parse_expr

    def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
        check_expression(text)
        return original(text, *args, **kwargs)

    # Before reasoning_gym is imported: some of its modules copy the name.
    parser.parse_expr = parse_expr
    sympy.parse_expr = parse_expr
    import reasoning_gym

    for module in EVALUATES_ANSWER:
        vars(importlib.import_module(f"reasoning_gym.{module}"))["eval"] = ast.literal_eval
    scorer = reasoning_gym.create_dataset(dataset, seed=0, size=1, **options)

    def score(answer: str, row: Mapping[str, Any]) -> float:
        entry = {name: row[name] for name in ("question", "answer", "metadata")}
        return float(scorer.score_answer(answer, entry))

    return score
