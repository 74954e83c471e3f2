"""The packaged recipes: named configurations that come with grpofit.

Owns where they lie and how they are listed. Must not know what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from grpofit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """A packaged recipe: its name, the first comment line of its file, and the file."""

    name: str
    summary: str
    path: Path


def recipes() -> list[RecipeInfo]:
    """All packaged recipes, by name."""
    folder = Path(str(files("grpofit") / "recipes"))
    return [RecipeInfo(path.stem, _summary(path), path) for path in sorted(folder.glob("*.yaml"))]


def _summary(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").removeprefix(f"{path.stem}: ").rstrip()


def recipe(name: str) -> RecipeInfo:
    """One recipe.

    Raises:
        ConfigError: there is none of this name; the nearest are listed.
    """
    known = {entry.name: entry for entry in recipes()}
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
    raise ConfigError(
        f"no recipe and no file is called '{name}'",
        values=f"nearest recipes: {', '.join(near)}",
        why="a name stands for a packaged recipe, a path for a YAML file of yours",
        fix=f"take one of them, e.g. {near[0]}   (all: grpofit recipes), or give the path of a .yaml file",
    )


def recipe_text(name: str) -> str:
    """The YAML of a recipe, comments included, to copy and change.

    Raises:
        ConfigError: there is none of this name.
    """
    return recipe(name).path.read_text(encoding="utf-8")
