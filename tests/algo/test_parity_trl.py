"""A few cases of `benchmarks/parity_trl.py`: TRL's own trainer gives the same losses, gradients and advantages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("trl")
# TRL and what it imports warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import parity_trl

    return parity_trl


def verdicts(result: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(row["loss"], row["variant"]): row["verdict"] for row in result["cases"]}


def test_losses_gradients_and_advantages_equal_trls(parity: ModuleType) -> None:
    result = parity.run(["gspo"], ["off-policy", "all together"])
    assert result["ok"]
    assert verdicts(result) == {("gspo", "off-policy"): "equal", ("gspo", "all together"): "equal"}
    assert all(0.1 < row["clipped_frac"] < 0.9 for row in result["cases"]), "clips must act for the case to count"
    assert len(result["advantages"]) == 4


def test_a_difference_counts_as_explained_only_when_trls_way_removes_it(
    parity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = parity.run(["dapo"], ["two updates a batch"])
    assert result["ok"] and verdicts(result) == {("dapo", "two updates a batch"): "explained"}
    assert result["cases"][0]["gradient_error"] > 0.01 > 1e-4 > result["cases"][0]["explained_gradient_error"]
    # our side at another temperature than TRL's: neither equal nor explained
    monkeypatch.setattr(parity, "TEMPERATURE", 1.0)
    result = parity.run(["dapo"], ["two updates a batch"])
    assert not result["ok"] and verdicts(result) == {("dapo", "two updates a batch"): "DIFFERS"}
