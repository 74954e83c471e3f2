"""reasoning_gym as a task and as a scorer; skipped where the extra is not installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from rollout_factory import make_rollout

from grpofit.config.tree import RewardConfig, TaskConfig
from grpofit.data.gym import EVALUATES_ANSWER, check_expression
from grpofit.data.tasks import load_task
from grpofit.data.verify import RewardRunner
from grpofit.errors import DataError
from grpofit.types import Reason

pytest.importorskip("reasoning_gym")


def gym_task(name: str, **keys) -> TaskConfig:
    return TaskConfig(name=f"reasoning_gym:{name}", **{"eval_size": 20, "train_size": 60, **keys})


def test_rows_are_different_and_splits_share_nothing():
    task = load_task(gym_task("basic_arithmetic"), Path("."))
    questions = [row["question"] for row in task.train + task.heldout]
    assert (len(task.train), len(task.heldout), len(set(questions))) == (60, 20, 80)
    assert set(task.columns) == {"question", "answer", "metadata"}
    again = load_task(gym_task("basic_arithmetic"), Path("."))
    assert again.train == task.train
    other = load_task(gym_task("basic_arithmetic", split_seed=1), Path("."))
    assert len({row["question"] for row in other.train} & set(questions)) < 10


def test_options_reach_the_data_set():
    task = load_task(gym_task("leg_counting", options={"min_animals": 2, "max_animals": 2}), Path("."))
    assert all(row["metadata"]["difficulty"]["num_animals"] == (2, 2) for row in task.train)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"name": "leg_countin"}, 'did you mean "leg_counting"?'),
        ({"name": "leg_counting", "options": {"animals": 3}}, "min_animals"),
        ({"name": "leg_counting", "options": {"min_animals": 5, "max_animals": 2}}, "max_animals"),
        ({"name": "coin_flip", "options": {"min_trials": 1, "max_trials": 1}, "eval_size": 200}, "eval_size"),
    ],
)
def test_mistakes_are_explained(keys, part):
    with pytest.raises(DataError) as caught:
        load_task(gym_task(**keys), Path("."))
    assert part in str(caught.value)
    assert [label for label, _ in caught.value.parts()] == ["got", "why", "fix"]


def test_own_scorer_in_a_worker():
    config = gym_task("countdown", eval_size=2, train_size=4)
    task = load_task(config, Path("."))
    row = task.train[0]
    numbers = row["metadata"]["numbers"]
    texts = {
        f"<answer>{row['answer']}</answer>": (1.0, Reason.CORRECT),
        " + ".join(map(str, numbers)) + " + 0*1": (0.05, Reason.WRONG),
        "": (0.0, Reason.NO_ANSWER),
        "__import__('os')._exit(3)": (0.01, Reason.WRONG),  # read as text, never run: the worker lives
        "10**10**10": (None, Reason.TIMEOUT),
    }
    rollouts = [make_rollout(text, row=i, **row) for i, text in enumerate(texts)]
    reward = RewardConfig(name="task", timeout_s=1.0)
    with RewardRunner(
        [reward], base_dir=Path("."), max_completion_tokens=64, columns=task.columns, max_error_frac=0.0, task=config
    ) as runner:
        runner.score(rollouts)
    assert {r.completion.text: (r.scores["task"].value, r.scores["task"].reason) for r in rollouts} == texts


def test_no_scorer_evaluates_the_answer():
    """Every module of the installed version that passes `answer` to eval is among those that get a safe one."""
    root = Path(importlib.util.find_spec("reasoning_gym").submodule_search_locations[0])
    found = set()
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if re.search(r"\b(eval|exec)\(", text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                arguments = {n.id for argument in node.args for n in ast.walk(argument) if isinstance(n, ast.Name)}
                if "answer" in arguments:
                    found.add(".".join(path.relative_to(root).with_suffix("").parts))
    assert found == set(EVALUATES_ANSWER)


def test_lists_are_read_as_literals():
    config = gym_task("spiral_matrix", eval_size=2, train_size=4)
    row = load_task(config, Path(".")).train[0]
    as_list = str([int(n) for n in row["answer"].split()])
    attack = f"[__import__('os').environ.get('HOME'), *{as_list}]"
    rollouts = [make_rollout(text, row=i, **row) for i, text in enumerate((row["answer"], as_list, attack))]
    with RewardRunner(
        [RewardConfig(name="task")],
        base_dir=Path("."),
        max_completion_tokens=64,
        columns=tuple(row),
        max_error_frac=0.0,
        task=config,
    ) as runner:
        runner.score(rollouts)
    assert [r.reward for r in rollouts[:2]] == [1.0, 0.1]
    assert rollouts[2].reward < 0.1


@pytest.mark.parametrize("text", ["x**2 + 2*x - 1", "(8 - 2)*4", "sin(x)*exp(x) + C", "log(x, 2)", "1.5*x", "3 = 3"])
def test_expressions_that_are_mathematics(text):
    check_expression(text)


@pytest.mark.parametrize(
    "text", ["open('x')", "exec(x)", "().__class__", "x.subs(1)", "[1]", "lambda: 1", "eval(x)", "1if 1else 2", "{1}"]
)
def test_expressions_that_are_not(text):
    with pytest.raises(ValueError, match=re.escape("not a mathematical expression")):
        check_expression(text)
