"""Compiled decoder layers for training: the small operations between matrix products become few.

Owns when compilation pays and how it is switched on around the training step alone. Must not know steps or rollouts.

Each layer's forward is compiled on its own: layers of a model share their code, so one of them is compiled and the
others reuse it, and the number of tokens is dynamic. Attention over packed rows stays outside.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

PAYS_FROM_STEP_TOKENS = 4_000
"""Trained tokens a step from which compiling pays within some 20 steps on a CPU. Measured with SmolLM2-135M on 2 cores:
it costs about 40 s the first time and saves about 0.5 ms a token (a quarter of forward and backward). The number of
steps does not count, since a run that is made longer when it is resumed must go on as it began."""


def compiler_missing(device: torch.device) -> str | None:
    """What is missing for compiled layers; None: nothing."""
    if device.type == "cpu":
        return None if any(map(shutil.which, ("g++", "clang++", "c++"))) else "no C++ compiler (g++, clang++) is found"
    try:
        import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


class CompiledLayers:
    """The decoder layers of a model with their compiled forwards, which act inside `switched_on` only.

    Rollouts run the same layers with a cache and one token a row: compiled for training, they would be compiled anew.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._compiled: list[Any] = [torch.compile(layer.forward, dynamic=True) for layer in self._layers]

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Backward must be inside, too, since it may recompute."""
        before = [vars(layer).get("forward") for layer in self._layers]
        try:
            for layer, forward in zip(self._layers, self._compiled, strict=True):
                layer.forward = forward
            yield
        finally:
            for layer, forward in zip(self._layers, before, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward
