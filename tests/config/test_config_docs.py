"""The generated page is fresh and complete."""

from __future__ import annotations

from pathlib import Path

from grpofit.config.describe import keys
from grpofit.config.docs import render
from grpofit.config.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m grpofit.config.docs > docs/config.md"


def test_every_key_has_one_row_with_its_meaning():
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    documented = [row[0].strip("|` ") for row in rows]
    assert documented[:2] == ["adapter", "quantization"]
    expected = [".".join("N" if part == 0 else str(part) for part in entry.path) for entry in keys()]
    assert sorted(documented) == sorted(expected)
    assert all(len(row) == 4 and all(cell.strip(" |") for cell in row) for row in rows)


def test_rows_by_hand():
    page = render()
    assert "| `optim.lr` | a number > 0 | `1.0e-6` | Peak learning rate." in page
    assert "| `memory.generation_chunk` | a whole number >= 1, or `auto`, or `none` | `auto` | Completions" in page
    assert "| `model.name` | text | required | " in page
    assert "| `rewards.N.weight` | a number | `1.0` | " in page


def test_every_rule_is_described_by_one_line():
    lines = [(rule.__doc__ or "").splitlines() for rule in RULES]
    assert all(len(doc) == 1 and doc[0] for doc in lines)
    assert all(f"- {doc[0]}" in render() for doc in lines)
