"""The rules of the layout: who may import whom, how long a file may be, what is read before it is needed."""

from __future__ import annotations

import ast
import importlib
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import grpofit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "grpofit"

# From low to high; a module imports only from layers below its own, or from its own subpackage.
LAYERS = [
    ["errors"],
    ["units"],
    ["types"],
    ["config", "recipes"],
    ["algo"],
    ["data", "models"],
    ["memory"],
    ["rollout"],
    ["training"],
    ["planning"],
    ["ablation"],
    ["api"],
    ["cli"],
    ["__main__"],
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

VERBS = ["recipes", "plan", "train", "eval", "export", "ablate", "diagnose", "report", "doctor"]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONGER_FUNCTIONS = {("training/step.py", "step"): 80}


@cache
def sources() -> dict[str, ast.Module]:
    """Every module by its dotted name without the package's: `training.step`, `training`, '' for the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def file_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> Iterator[tuple[str, int]]:
    """(imported module of ours, line), those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "grpofit" or alias.name.startswith("grpofit."):
                    yield alias.name.removeprefix("grpofit").removeprefix("."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file_of(module)}:{node.lineno}: relative import; write the full name"
            if node.module == "grpofit" or (node.module or "").startswith("grpofit."):
                base = (node.module or "").removeprefix("grpofit").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".removeprefix(".")
                    yield (inner if inner in sources() else base), node.lineno


def edges() -> Iterator[tuple[str, str, int]]:
    for module in sources():
        for target, line in imports(module):
            if module != "" and target != "":  # the package itself holds only the version and lazy verbs
                yield module, target, line


def test_every_module_has_a_place_in_the_order():
    unknown = {module.split(".")[0] for module in sources()} - set(RANK) - {""}
    assert not unknown, f"no layer for {sorted(unknown)}: see the order of layers in ARCHITECTURE.md"


def test_imports_go_down():
    wrong = []
    for module, target, line in edges():
        above, below = module.split(".")[0], target.split(".")[0]
        if above != below and RANK[above] <= RANK[below]:
            wrong.append(f"{file_of(module).relative_to(ROOT)}:{line}: {above} imports {below}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    graph: dict[str, set[str]] = {module: set() for module in sources()}
    for module, target, _ in edges():
        if target != module:
            graph[module].add(target)

    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    long = []
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                path = file_of(module).relative_to(PACKAGE).as_posix()
                if length > LONGER_FUNCTIONS.get((path, node.name), MAX_FUNCTION_LINES):
                    long.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)


def test_modules_say_what_they_own():
    silent = [str(file_of(module)) for module, tree in sources().items() if not ast.get_docstring(tree)]
    assert not silent


def described_modules() -> list[str]:
    """The modules that ARCHITECTURE.md names: lines of its first code block whose first word ends in .py or /."""
    path = ROOT / "ARCHITECTURE.md"
    assert path.is_file(), "ARCHITECTURE.md is missing: the tree of src/grpofit with one line a module"
    block = re.search(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert block, "ARCHITECTURE.md has no code block with the tree"
    folders: list[tuple[int, str]] = []
    named = []
    for line in block[1].splitlines():
        found = re.match(r"(\s*)(\S+(?:\.py|/))(?:\s|$)", line)
        if not found:
            continue
        indent, word = len(found[1]), found[2]
        while folders and folders[-1][0] >= indent:
            folders.pop()
        full = (folders[-1][1] if folders else "") + word
        if word.endswith("/"):
            folders.append((indent, full))
        else:
            named.append(full.removeprefix("src/grpofit/"))
    return named


def test_architecture_names_every_module_once():
    """A subpackage's `__init__.py` stands under the name of its folder."""
    expected = sorted(file_of(m).relative_to(PACKAGE).as_posix() for m in sources())
    expected = [path for path in expected if not path.endswith("/__init__.py")]
    assert sorted(described_modules()) == expected


def test_verbs_are_functions_after_every_module_is_imported():
    for module in sources():
        if module != "__main__":
            importlib.import_module(f"grpofit.{module}".rstrip("."))
    for name in grpofit.__all__:
        if name != "__version__":
            assert callable(getattr(grpofit, name)), f"grpofit.{name} is a {type(getattr(grpofit, name))}"


def test_no_subpackage_is_named_like_a_verb():
    # `recipes` holds data only: without an __init__.py it is no package, and nothing imports it as one.
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not packages & set(VERBS)


def loaded_by(code: str) -> set[str]:
    """Top-level modules in `sys.modules` after `code` ran in a new process."""
    code = f"import sys\ntry:\n  {code}\nexcept SystemExit as e:\n  assert not e.code\nprint('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return {name.split(".")[0] for name in done.stdout.rpartition("LOADED ")[2].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import grpofit",
        "from grpofit.cli import main; main(['--help'])",
        "from grpofit.cli import main; main(['train', '--help'])",
        "from grpofit.cli import main; main(['recipes'])",
        "import grpofit.config, grpofit.types, grpofit.training.records, grpofit.training.screen",
    ],
)
def test_reads_no_torch(code):
    heavy = {"torch", "transformers", "datasets", "pandas", "matplotlib", "wandb", "tensorboard"}
    assert not loaded_by(code) & heavy


def test_help_is_fast():
    """In CPU seconds, which are its seconds on a machine that is not busy."""

    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "grpofit", "--help"], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    run()  # the first may have to compile
    assert min(run() for _ in range(3)) < 0.5
