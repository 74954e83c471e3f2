"""What users get wrong, through the command line: four parts, the documented exit code, nothing lost or left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_factory import REWARD_FILE, final_digest, steps_of, tiny_config, train, write_yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpofit.cli import main

ROWS = [{"prompt": f"{n} + 1", "answer": n + 1, "level": "a"} for n in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config(folder)
    return folder / "model"


@pytest.fixture
def document(model, tmp_path):
    """A configuration over `data.jsonl`, both in an empty folder."""
    (tmp_path / "model").symlink_to(model)
    config = tiny_config(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {**config, "task": {"file": "data.jsonl", "eval_size": 6, "template": "none"}}


def assert_four_parts(err: str, *named: str, fix: str) -> None:
    assert err.startswith("error  "), err
    for label in ("got", "why", "fix"):
        assert f"\n  {label}  " in err, f"no part {label!r} in:\n{err}"
    assert "Traceback (most" not in err.partition("\n  got")[0] and "bug" not in err
    for text in named:
        assert text in err.partition("\n  why")[0], err
    assert fix in err.partition("\n  fix")[2], err


def refused(cli, *named: str, fix: str, line: str = "train tiny.yaml --out out/run --plain") -> str:
    """The command must end with code 2 and leave no file behind."""
    code, _, err = cli(line)
    assert code == 2, err
    assert_four_parts(err, *named, fix=fix)
    assert [path for path in Path("out").rglob("*") if not path.is_dir()] == []
    assert not Path("out/run").exists()
    return err


# The configuration


def test_unknown_recipe(cli):
    refused(cli, "smollm2-aritmetic", fix="smollm2-arithmetic", line="train smollm2-aritmetic --out out/run")


@pytest.mark.parametrize(
    "section, content, named, fix",
    [
        ("rollout", {"group_sise": 4}, "group_sise", "group_size"),
        ("rewards", [{"name": "last_numer"}], "last_numer", "last_number"),
        ("task", {"name": "arithmetik"}, "arithmetik", "arithmetic"),
        ("rollout", {"group_size": 1}, "rollout.group_size = 1", "rollout.group_size="),
        ("rewards", [{"name": "last_number", "weight": 0}], "weight", "rewards.0.weight=1"),
        ("run", {"steps": 0}, "run.steps", "run.steps="),
    ],
)
def test_a_value_that_the_configuration_refuses(cli, document, tmp_path, section, content, named, fix):
    write_yaml(tmp_path, {**document, section: content})
    refused(cli, named, fix=fix)


def test_several_mistakes_are_told_at_once(cli, document, tmp_path):
    write_yaml(tmp_path, {**document, "rollout": {"group_sise": 4}, "optim": {"lr": -1}, "run": {"step": 3}})
    code, _, err = cli("train tiny.yaml --out out/run")
    assert code == 2 and all(word in err for word in ("group_sise", "lr", "run.step", "steps"))


# The model


@pytest.mark.parametrize(
    "name, named",
    [("./nowhere", "nowhere"), ("nobody/no-such-model-135m", "nobody/no-such-model-135m"), ("./empty", "empty")],
)
def test_unknown_model(cli, document, tmp_path, name, named):
    (tmp_path / "empty").mkdir()
    write_yaml(tmp_path, {**document, "model": {"name": name}})
    refused(cli, named, fix="model.name")


def test_a_model_without_eos(cli, document, model, tmp_path):
    without = AutoModelForCausalLM.from_pretrained(model)
    without.config.eos_token_id = without.generation_config.eos_token_id = None
    without.save_pretrained(tmp_path / "without")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "without")
    write_yaml(tmp_path, {**document, "model": {"name": "./without"}})
    refused(cli, "has no EOS id", fix="eos_token_id")


def test_prompt_and_completion_over_the_models_positions(cli, document, tmp_path):
    rollout = {**document["rollout"], "max_prompt_tokens": 100, "max_completion_tokens": 29}
    write_yaml(tmp_path, {**document, "rollout": rollout})
    refused(cli, "128 positions", "1 too many", fix="--set rollout.max_completion_tokens=28")


def test_no_prompt_short_enough(cli, document, tmp_path):
    write_yaml(tmp_path, {**document, "rollout": {**document["rollout"], "max_prompt_tokens": 4}})
    refused(cli, "no prompt is short enough", "the shortest has 5 tokens", fix="rollout.max_prompt_tokens=")


# The data


@pytest.mark.parametrize(
    "content, named, fix",
    [
        (None, 'data.jsonl" is not a file', "task.file"),
        (b"", "has no rows", "two rows"),
        (b"\n\n", "has no rows", "two rows"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2", "line 2"),
        (b'[{"prompt": "a"}]', "not an object", "jq"),
        (b"\xff\xfe\x00\x01", "line 1", "line 1"),
        (b"\x00" * 64, "line 1", "line 1"),
        (b'{"prompt": "a"}\n{"question": "b"}\n', "line 2", "task.prompt"),
        (b'{"prompt": "a"}\n{"prompt": ""}\n', "line 2", "task.prompt"),
        (b'{"prompt": "a"}\n{"prompt": 7}\n', "line 2", "task.prompt"),
        (b'{"prompt": "a"}\n{"prompt": "b"}\n', "eval_size 6 is more than half", "task.eval_size=1"),
    ],
)
def test_data_that_cannot_be_used(cli, document, tmp_path, content, named, fix):
    if content is None:
        (tmp_path / "data.jsonl").unlink()
    else:
        (tmp_path / "data.jsonl").write_bytes(content)
    write_yaml(tmp_path, document)
    refused(cli, named, fix=fix)


def test_a_file_of_an_unknown_kind(cli, document, tmp_path):
    (tmp_path / "data.txt").write_text("a\nb\n")
    write_yaml(tmp_path, {**document, "task": {"file": "data.txt"}})
    refused(cli, "data.txt", fix="task.file")


def test_a_parquet_file_that_is_none(cli, document, tmp_path):
    (tmp_path / "data.parquet").write_text("PAR1 not really")
    write_yaml(tmp_path, {**document, "task": {"file": "data.parquet"}})
    refused(cli, "data.parquet", fix="check the file")


# The rewards


def test_a_column_that_a_reward_needs_is_missing(cli, document, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{n}", "solution": {n}}}\n' for n in range(20)))
    write_yaml(tmp_path, {**document, "rewards": [{"name": "last_number"}]})
    refused(cli, 'needs the column "answer"', "columns: prompt, solution", fix="{{ solution }}")


def test_a_column_that_a_function_needs_is_missing(cli, document, tmp_path):
    write_yaml(tmp_path, document)
    (tmp_path / "rewards.py").write_text("def small_letters(completions, difficulty, **kwargs): return []\n")
    refused(cli, 'the column "difficulty"', fix="difficulty")


@pytest.mark.parametrize(
    "text, named, fix",
    [
        (None, "rewards.py", "rewards.0.function"),
        ("def other(**kwargs): pass\n", "it has: other", "rewards.0.function"),
        ("import no_such_package\n", "no_such_package", "installed"),
        ("def small_letters(:\n", "SyntaxError", "import"),
        ("raise SystemExit(0)\n", "SystemExit", "import"),
    ],
)
def test_a_function_that_cannot_be_loaded(cli, document, tmp_path, text, named, fix):
    write_yaml(tmp_path, document)
    (tmp_path / "rewards.py").unlink()
    if text is not None:
        (tmp_path / "rewards.py").write_text(text)
    refused(cli, named, fix=fix)


FAILING = REWARD_FILE.replace(
    "    return [",
    """    global calls
    calls += 1
    if calls >= 5:  # the first evaluation, two steps and the evaluation after them went well
        {failure}
    return [""",
).replace("def small_letters", "calls = 0\n\n\ndef small_letters")


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """The run that the failing ones below must end as."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "model").symlink_to(model)
    path = write_yaml(folder, {**tiny_config(folder)})
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--out", str(folder / "run"), "--plain"])
    assert not ended.value.code
    return final_digest(folder / "run")


@pytest.mark.parametrize(
    "failure, named",
    [
        ("raise ValueError('too short')", 'rewards.py", line 11, in small_letters'),
        ("return [1.0]", "returned 1 values for 12 completions"),
        ("return [float('nan')] * len(completions)", "returned nan"),
        ("return ['good'] * len(completions)", "returned 'good' (a str)"),
        ("return None", "returned a NoneType"),
        ("import os; os._exit(3)", "its process ended: exit code 3"),
    ],
)
def test_a_reward_that_fails_stops_the_run_which_goes_on_when_it_is_mended(
    cli, document, tmp_path, undisturbed, failure, named
):
    write_yaml(tmp_path, tiny_config(tmp_path) | {"run": {**document["run"], "keep_last": 1}})
    (tmp_path / "rewards.py").write_text(FAILING.replace("{failure}", failure))
    code, out, err = cli("train tiny.yaml --out 'out/my run' --plain")
    assert code == 4
    assert_four_parts(err, named, fix="then go on with: grpofit train --resume 'out/my run'")
    assert "step 2/4" in out and "step 3/4" not in out
    assert [path.name for path in Path("out/my run/checkpoints").iterdir()] == ["step-000002"]
    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    code, _, err = cli(err.rpartition("grpofit ")[2])
    assert code == 0, err
    assert steps_of(Path("out/my run")) == [1, 2, 3, 4] and final_digest(Path("out/my run")) == undisturbed


def test_a_reward_that_fails_at_once(cli, document, tmp_path):
    write_yaml(tmp_path, document)
    (tmp_path / "rewards.py").write_text("def small_letters(completions, **kwargs): return 1 / 0\n")
    code, _, err = cli("train tiny.yaml --out out/run --plain")
    assert code == 4
    assert_four_parts(err, 'rewards.py", line 1', "ZeroDivisionError: division by zero", fix="--resume out/run")


# Run directories


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with `tiny.yaml` and its finished run `out/run`."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_config(folder)
    path = write_yaml(folder, {**config, "run": {**config["run"], "steps": 1, "eval_every": 0}})
    train(path, out=folder / "out" / "run", rewards={})
    return folder


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "line, named, fix",
    [
        ("train tiny.yaml --out out/run", "run directory 'out/run' exists", "grpofit train --resume out/run"),
        ("train tiny.yaml --out model", "it holds something else", "--out"),
        ("train --resume out/run --set optim.lr=0.5", "optim.lr: 0.01 -> 0.5", "grpofit train --resume out/run"),
        ("train --resume out/run --set rollout.group_size=8", "rollout.group_size: 4 -> 8", "start a new run"),
        ("train --resume out/run --set optim.lrs=0.5", "optim.lrs", "optim.lr="),
        ("train --resume out/none", "no such folder", "grpofit train --resume runs/latest"),
        ("train --resume out", "no config.yaml in", "grpofit train --resume runs/latest"),
        ("train --resume out/run --out out/other", "out/other", "leave out --out"),
    ],
)
def test_directories(cli, finished, monkeypatch, line, named, fix):
    monkeypatch.chdir(finished)
    before = contents("out")
    code, _, err = cli(f"{line} --plain")
    assert code == 2, err
    assert_four_parts(err, named, fix=fix)
    assert contents("out") == before


def test_in_a_process_of_its_own(document, tmp_path):
    """Nothing but the four parts reaches the terminal, whatever libraries print on the way."""
    write_yaml(tmp_path, {**document, "rollout": {**document["rollout"], "max_prompt_tokens": 4}})
    command = [sys.executable, "-m", "grpofit", "train", "tiny.yaml", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 2
    assert_four_parts(done.stderr, "no prompt is short enough", fix="rollout.max_prompt_tokens=")
    assert not (tmp_path / "run").exists()
