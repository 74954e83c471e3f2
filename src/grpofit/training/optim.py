"""AdamW in float32 whatever the weights' dtype, gradients accumulated in float32, the learning-rate schedule.

Owns the optimizer state and how it is saved. Must not know about losses or rollouts.

A bfloat16 weight near 1 moves in steps of 1/128, so an update of 1e-6 would round away: AdamW updates a float32
master, and the weight is its rounding (`masters`). Gradients of micro batches are added in float32, since adding them
in bfloat16 changes the result by 15 to 25% (measured). Moments are float32 always: with beta2 = 0.999 the second
moment moves by a thousandth a step, which bfloat16 would round away.

Bytes a weight, for bfloat16 weights: 4 for weight and master, 8 for the moments; from backward to the update 2 for
the gradient, 4 from the second micro batch on. The update goes through the parameters piece by piece: nothing is
widened or copied whole, and on a CPU a piece stays in the cache from one operation to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from grpofit.config import OptimConfig
from grpofit.training.masters import Scratch, flat, make_master

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PIECE_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Weights updated at once: on a CPU what its cache holds, on a card enough to keep it busy (12 bytes each)."""


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Rate of 0-based `step`: linear warm-up, then the schedule, which reaches `min_lr_frac` at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - 1 - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * left)


class MasterAdamW:
    """AdamW over float32 masters of the trainable parameters, which must all be on one device.

    It takes every parameter's gradient away as soon as backward has it; `gradients` shows them.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        *,
        master: bool,
        seed: int = 0,
    ) -> None:
        """`master`: keep float32 values of parameters in other dtypes; else round as `config.rounding` says.

        `seed` is part of the key of every draw of stochastic rounding.
        """
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.contiguous()
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
        self._masters = {
            name: make_master(parameter, keep=master, rounding=config.rounding, key=(seed, index))
            for index, (name, parameter) in enumerate(self._parameters.items())
        }
        # Moments exist before the first step, so that memory does not jump at its end.
        self._moments = {
            name: [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for _ in _MOMENTS]
            for name, p in self._parameters.items()
        }
        self._gradients: dict[str, Tensor] = {}
        self._factor: Tensor | None = None  # of all gradients, from clipping
        self._updates = 0
        self._device = next(iter(self._parameters.values())).device
        self._config = config
        self._kernel = "fused" if config.implementation == "auto" else config.implementation

    def _take(self, name: str, parameter: Tensor) -> None:
        """Hook: the gradient of a micro batch. The first one stays as it is, from the second on they add up wide."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if name not in self._gradients:
            self._gradients[name] = gradient
            return
        total = self._gradients[name]
        if total.dtype != torch.float32:
            total = self._gradients[name] = total.float()
        # In pieces, since adding another dtype makes a wide copy of it first.
        size = self._piece_weights
        for part, added in zip(total.view(-1).split(size), gradient.reshape(-1).split(size), strict=True):
            part.add_(added)

    def gradients(self) -> Mapping[str, Tensor]:
        """Sums over the micro batches so far, before clipping; float32, or the parameter's dtype after only one.

        A parameter without a gradient is missing. An update uses them up.
        """
        return self._gradients

    def zero_grad(self) -> None:
        """Forget all gradients, and their memory."""
        self._gradients.clear()
        self._factor = None

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> Tensor:
        """Norm of the whole gradient before clipping, a float32 scalar on the device; clips if `max_norm` is given.

        Clipping is a factor that the update applies.
        """
        scratch = self._scratch()
        norms = [
            torch.linalg.vector_norm(self._wide(gradient.reshape(-1), piece, scratch))
            for gradient in self._gradients.values()
            for piece in scratch.pieces(gradient.numel())
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self._device)
        if self._factor is not None:
            norm = norm * self._factor
        if max_norm is not None:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as nn.utils.clip_grad_norm_
            self._factor = factor if self._factor is None else self._factor * factor
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One update at rate `lr`; a missing gradient counts as 0. Uses up the gradients.

        Returns how many weights took a new value, an int64 scalar on the device.
        """
        scratch = self._scratch()
        self._updates += 1
        changed = torch.zeros((), dtype=torch.int64, device=self._device)
        for name in self._parameters:
            self._update(name, lr, scratch, changed)
        self.zero_grad()
        return changed

    def _update(self, name: str, lr: float, scratch: Scratch, changed: Tensor) -> None:
        """Update one parameter; adds to `changed` how many of its weights took a new value."""
        master, weights = self._masters[name], flat(self._parameters[name])
        averages, squares = (flat(moment) for moment in self._moments[name])
        gradient = self._gradients.pop(name, None)
        gradient = None if gradient is None else gradient.reshape(-1)
        seen = weights.view(torch.int32 if weights.element_size() == 4 else torch.int16)
        for piece in scratch.pieces(weights.numel()):
            values = master.read(piece, scratch)
            wide = self._wide(gradient, piece, scratch)
            if self._factor is not None:
                wide.mul_(self._factor)
            before = seen[piece].clone()
            self._adamw(values, wide, averages[piece], squares[piece], lr)
            master.write(piece, values, scratch, self._updates)
            changed += torch.count_nonzero(before.bitwise_xor_(seen[piece]))

    def _adamw(self, values: Tensor, gradient: Tensor, average: Tensor, square: Tensor, lr: float) -> None:
        """torch's AdamW on float32 [n], in place."""
        config = self._config
        settings: dict[str, Any] = {
            "amsgrad": False, "beta1": config.betas[0], "beta2": config.betas[1], "lr": lr,
            "weight_decay": config.weight_decay, "eps": config.eps, "maximize": False,
        }  # fmt: skip
        if self._kernel == "fused":
            # The kernel below the function, whose checks take ten times as long as a small piece.
            count = torch.full((), float(self._updates), device=values.device)
            torch._fused_adamw_([values], [gradient], [average], [square], [], [count], **settings)
        else:
            count = torch.full((), self._updates - 1.0)  # in host memory; the function counts on
            foreach = self._kernel == "foreach"
            adamw([values], [gradient], [average], [square], [], [count], foreach=foreach, fused=False, **settings)

    @staticmethod
    def _wide(gradient: Tensor | None, piece: slice, scratch: Scratch) -> Tensor:
        """A piece of a flat gradient as float32, the same memory where it is; zeros if there is none."""
        if gradient is None:
            return scratch.gradient[: piece.stop - piece.start].zero_()
        if gradient.dtype == torch.float32:
            return gradient[piece]
        return scratch.gradient[: piece.stop - piece.start].copy_(gradient[piece])

    @property
    def _piece_weights(self) -> int:
        return _PIECE_WEIGHTS.get(self._device.type, _PIECE_WEIGHTS["cuda"])

    def _scratch(self) -> Scratch:
        return Scratch(min(self._piece_weights, max(p.numel() for p in self._parameters.values())), self._device)

    def count_weights(self) -> int:
        """Trainable weights."""
        return sum(p.numel() for p in self._parameters.values())

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resumed run needs: masters (or weights), moments, update counts. Copies only where it must."""
        scratch = self._scratch()
        tensors = {}
        for name, master in self._masters.items():
            tensors[f"master/{name}"] = master.whole(scratch)
            tensors[f"step/{name}"] = torch.tensor(float(self._updates))
            for moment, tensor in zip(_MOMENTS, self._moments[name], strict=True):
                tensors[f"{moment}/{name}"] = tensor
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_tensors`; the weights become the rounding of their masters."""
        scratch = self._scratch()
        for name, master in self._masters.items():
            saved = tensors[f"master/{name}"].reshape(-1)
            for piece in scratch.pieces(saved.numel()):
                values = master.read(piece, scratch)
                master.write(piece, values.copy_(saved[piece]), scratch, self._updates)
            for moment, tensor in zip(_MOMENTS, self._moments[name], strict=True):
                tensor.copy_(tensors[f"{moment}/{name}"])
            self._updates = int(tensors[f"step/{name}"])
