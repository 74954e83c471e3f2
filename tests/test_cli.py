"""The command line as a person uses it: what is printed where, and with which exit code it ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import grpofit
from grpofit import config
from grpofit.errors import ConfigError, StoppedError

RECIPE = "smollm2-arithmetic"


def test_version(cli):
    assert cli("--version") == (0, f"grpofit {grpofit.__version__}\n", "")


@pytest.mark.parametrize("verb, examples", [("", 3), ("train", 3), ("eval", 3), ("recipes", 3)])
def test_help_ends_with_examples_and_exit_codes(cli, verb, examples):
    code, out, _ = cli(f"{verb} --help")
    assert code == 0
    shown = out.partition("Examples:")[2].splitlines()
    assert sum(line.startswith("    grpofit ") for line in shown) >= examples
    assert " ".join(out.split()).endswith("the run stopped itself and kept its checkpoint, 130 interrupted.")
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("verb", ["", "train", "eval", "recipes"])
def test_examples_in_help_name_options_that_exist(cli, verb):
    out = cli(f"{verb} --help")[1]
    options, examples = out.split("Examples:")
    if verb:
        for word in shlex.split(" ".join(line for line in examples.splitlines() if "grpofit" in line)):
            assert not word.startswith("--") or word in options


def test_options_are_few_and_frozen(cli):
    """A new option is a decision: everything of a configuration is reached by --set."""
    found = {verb: sorted(set(_options(cli(f"{verb} --help")[1]))) for verb in ("train", "eval", "recipes")}
    assert found == {
        "train": ["--dry-run", "--help", "--out", "--plain", "--resume", "--set"],
        "eval": ["--help", "--samples", "--set", "--show", "--task"],
        "recipes": ["--copy", "--help"],
    }


def _options(text: str) -> list[str]:
    lines = text.partition("Options:")[2].partition("Examples:")[0].splitlines()
    return [word for line in lines for word in line.split()[:2] if word.startswith("--")]


def test_recipes_lists_them(cli):
    code, out, err = cli("recipes")
    assert (code, err) == (0, "")
    assert any(line.startswith(f"{RECIPE}  ") and len(line) > 40 for line in out.splitlines())
    assert out.splitlines()[-1].startswith("next: grpofit train ")


def test_recipes_prints_one_as_yaml(cli):
    code, out, err = cli(f"recipes {RECIPE}")
    assert code == 0
    assert yaml.safe_load(out)["model"]["name"] == "smollm2-135m"
    assert err == f"next: grpofit recipes {RECIPE} --copy {RECIPE}.yaml\n"


def test_recipes_copies_one_and_never_overwrites(cli):
    code, out, _ = cli(f"recipes {RECIPE} --copy 'my run.yaml'")
    assert code == 0
    assert out == "wrote my run.yaml\nnext: grpofit train 'my run.yaml'\n"
    assert Path("my run.yaml").read_text("utf-8") == config.recipe_text(RECIPE)
    Path("my run.yaml").write_text("changed: true\n")
    code, out, err = cli(f"recipes {RECIPE} --copy 'my run.yaml'")
    assert (code, out) == (2, "")
    assert err.startswith("error  cannot write 'my run.yaml'\n  got  File exists\n  why  ")
    assert Path("my run.yaml").read_text("utf-8") == "changed: true\n"


def test_dry_run_of_a_resume_trains_nothing(cli):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(config.load(RECIPE).to_yaml(), "utf-8")
    code, out, err = cli("train --resume run --dry-run --set run.steps=7")
    assert (code, err) == (0, "next: grpofit train --resume run --set run.steps=7\n")
    assert "steps: 7" in out and [path.name for path in Path("run").iterdir()] == ["config.yaml"]


def test_dry_run_prints_a_configuration_that_loads_to_the_same(cli):
    code, out, err = cli(f"train {RECIPE} --dry-run --set run.steps=3 --set 'optim.lr=1e-5'")
    assert code == 0
    assert err == f"next: grpofit train {RECIPE} --set run.steps=3 --set optim.lr=1e-5\n"
    Path("resolved.yaml").write_text(out, "utf-8")
    resolved = config.load("resolved.yaml").config
    assert resolved == config.load(RECIPE, ["run.steps=3", "optim.lr=1e-5"]).config
    assert resolved.run.steps == 3
    lines = {line.split(":")[0].strip(): line for line in out.splitlines()}
    assert lines["steps"].endswith("# --set")
    assert lines["group_size"].endswith(f"# recipe {RECIPE}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "line, named, fix",
    [
        ("train", "needs a recipe or file, or --resume", "grpofit train smollm2-arithmetic"),
        ("train a --resume runs/a", "not both", "grpofit train --resume runs/a"),
        ("train smollm2-arithmetik --dry-run", "'smollm2-arithmetik'", RECIPE),
        ("train none.yaml --dry-run", "none.yaml", "grpofit recipes"),
        (f"train {RECIPE} --dry-run --set rollout.group_sise=4", "group_sise", "group_size"),
        (f"train {RECIPE} --dry-run --set rollout.group_size=1", "group_size", "--set rollout.group_size="),
        (f"train {RECIPE} --dry-run --set steps", "steps", "--set "),
        ("recipes nothing", "'nothing'", "grpofit recipes"),
        ("recipes --copy x.yaml", "--copy needs the name", "grpofit recipes NAME --copy x.yaml"),
    ],
)
def test_user_mistakes_have_four_parts_and_code_2(cli, line, named, fix):
    code, out, err = cli(line)
    assert (code, out) == (2, "")
    assert err.startswith("error  ") and named in err
    for label in ("why", "fix"):
        assert f"\n  {label}  " in err
    assert fix in err.partition("\n  fix")[2]
    assert "Traceback" not in err


@pytest.mark.parametrize("line", ["trian", "train a b", "train --steps 3", "eval", "eval x --samples -1"])
def test_a_line_that_cannot_be_parsed(cli, line):
    code, out, err = cli(line)
    assert (code, out) == (2, "")
    assert "Error: " in err and "-h' for help" in err


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("broken [bold]thing[/]", values="v", why="w", fix="line 1\nline 2"), 2),
        (StoppedError("stopped"), 4),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("x / 0"), 1),
    ],
)
def test_exit_codes(cli, monkeypatch, error, code):
    def broken() -> None:
        raise error

    monkeypatch.setattr(config, "recipes", broken)
    got, out, err = cli("recipes")
    assert (got, out) == (code, "")
    assert "Traceback" not in err
    if code == 2:
        assert err == "error  broken [bold]thing[/]\n  got  v\n  why  w\n  fix  line 1\n       line 2\n"
    assert "Traceback" in cli("recipes --traceback")[2]


def test_a_bug_leaves_its_traceback_in_a_file(cli, monkeypatch, tmp_path):
    def broken() -> None:
        raise ZeroDivisionError("x / 0")

    monkeypatch.setattr(config, "recipes", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    err = cli("recipes")[2]
    [path] = tmp_path.glob("grpofit-*.txt")
    assert err.startswith("error  ZeroDivisionError: x / 0\n") and str(path) in err
    assert "in broken" in path.read_text()


def test_as_a_module_and_into_a_closed_pipe():
    command = f"{sys.executable} -m grpofit recipes {RECIPE} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"# {RECIPE}: ")
    assert "Traceback" not in done.stderr


def test_output_that_is_not_utf8():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "grpofit", "train", "café", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "caf\\xe9" in done.stderr


@pytest.fixture
def tiny_run(tmp_path):
    """A YAML for a run of two steps on a model of a few thousand weights."""
    from tiny import save_tiny_model

    save_tiny_model(tmp_path / "model")
    document = {
        "model": {"name": "./model", "dtype": "float32"},
        "task": {"name": "arithmetic", "eval_size": 6, "train_size": 20},
        "rewards": [{"name": "last_number"}],
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_prompt_tokens": 64, "max_completion_tokens": 4},
        "optim": {"lr": 1e-4},
        "run": {"steps": 2, "eval_every": 0, "checkpoint_every": 1, "threads": 1},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document))
    return "tiny.yaml"


def test_train_then_eval(cli, tiny_run):
    code, out, err = cli(f"train {tiny_run} --out runs/a --plain")
    assert code == 0, err
    lines = out.splitlines()
    assert "torch" in lines[0] and "cpu" in lines[0].lower()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/2", "2/2"]
    assert any(line.startswith("learned   held-out accuracy ") for line in lines)
    assert lines[-1] == "next: grpofit eval runs/a"

    code, out, err = cli("eval runs/a --samples 2 --show 1")
    assert code == 0, err
    assert "of 6)" in out and "pass_at_2" in out and "(answer " in out
    assert out.splitlines()[-1].startswith("next: grpofit ")

    code, out, err = cli(f"train {tiny_run} --out runs/a --plain")
    assert (code, out) == (2, "")
    assert "runs/a" in err and "--resume" in err


def test_a_run_is_stopped_by_ctrl_c_and_resumed_by_the_line_it_prints(cli, tiny_run):
    command = [sys.executable, "-u", "-m", "grpofit", "train", tiny_run, "--set", "run.steps=100000", "--out", "runs/b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == ""
    resume = lines[-1].partition("go on with: ")[2].strip()
    assert resume == "grpofit train --resume runs/b"
    # The seed decides what is trained, so a resumed run refuses another.
    code, _, err = cli(f"{resume.removeprefix('grpofit ')} --set run.seed=7")
    assert code == 2 and "run.seed" in err
