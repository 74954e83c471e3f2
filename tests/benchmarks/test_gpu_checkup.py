"""The verdicts of `benchmarks/gpu/checkup.py`: what fails a run. The sections themselves run with `--cpu-dry`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def checkup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "TRL_EXPERIMENTAL_SILENCE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(variable, "")  # the module sets them; this brings them back
    monkeypatch.syspath_prepend(str(GPU))
    import checkup

    return checkup


def modes(**allocated_gib: float | None) -> dict[str, Any]:
    return {"modes": {"figures": {name: {"allocated_gib": value} for name, value in allocated_gib.items()}}}


def test_a_mode_that_saves_nothing_fails(checkup: ModuleType) -> None:
    found = checkup.expectations(modes(none=9.0, selective=6.0, full=6.5, offload=3.0))
    assert [check["passed"] for check in found] == [True, False, True]
    assert checkup.expectations(modes(none=None, selective=None)) == []  # a CPU tells no peaks


def test_generate_must_not_be_faster(checkup: ModuleType) -> None:
    records = modes(none=9.0) | {
        "decode speed": {"figures": {"generate_tokens_per_s": 100.0, "engine_tokens_per_s": 90.0}}
    }
    assert [check["passed"] for check in checkup.expectations(records)] == [False]


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"checks": [{"name": "a", "value": 1.0, "limit": 2.0, "passed": True}]}, 0),
        ({"checks": [{"name": "a", "value": 3.0, "limit": 2.0, "passed": False}]}, 1),
        ({"checks": [], "broken": "stopped after 9 s"}, 1),
    ],
)
def test_exit_code_and_results(
    checkup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any], code: int
) -> None:
    assert checkup.finish({"device": "Some Card"}, {"packing": record}, False, tmp_path) == code
    written = json.loads((tmp_path / "some-card-packing.json").read_text())
    assert written["sections"]["packing"] == record
    assert ("BROKEN  packing: stopped" in capsys.readouterr().out) == ("broken" in record)


def test_nan_is_no_pass(checkup: ModuleType) -> None:
    import checks

    assert checks.Check("a", 1.0, 1.0).passed
    assert not checks.Check("a", math.nan, 1.0).passed


def test_every_section_exists(checkup: ModuleType) -> None:
    import importlib

    for section in checkup.SECTIONS.values():
        assert callable(getattr(importlib.import_module(section.module), section.function))


def test_the_limits_of_all_sections_fit(checkup: ModuleType) -> None:
    assert checkup.BUDGET_S <= 8 * 60
    assert all(section.limit_s < checkup.BUDGET_S / 3 for section in checkup.SECTIONS.values())
