"""grpofit: train language models with GRPO on the GPU you own.

Owns the public names: the verbs as functions, loaded on first use, so that `import grpofit` reads no torch. Must not
hold any logic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpofit.api import evaluate as evaluate
    from grpofit.api import load as load
    from grpofit.api import recipes as recipes
    from grpofit.api import train as train

__version__ = "0.1.0"

_VERBS = ("evaluate", "load", "recipes", "train")

__all__ = ["__version__", *_VERBS]


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'grpofit' has no attribute {name!r}")
    from grpofit import api

    # Kept here under the verb's name: a data folder `grpofit/recipes` must not take the place of the function later.
    value = globals()[name] = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
