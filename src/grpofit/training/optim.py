"""AdamW on a full-precision master copy, gradients accumulated in float32, the learning-rate schedule.

Owns the optimizer state and how it is saved. Must not know about losses or rollouts.

A bfloat16 weight near 1 moves in steps of 1/128, so an update of 1e-6 would round away: AdamW updates a float32
master, and the weight is its rounding. Gradients of micro batches are added in float32, since adding them in
bfloat16 changes the result by 15 to 25% (measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from grpofit.config import OptimConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """AdamW over float32 masters of the trainable parameters."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, *, master: bool):
        """`master`: keep float32 copies of parameters in other dtypes; else update them as they are."""
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._masters = {
            name: p if not master or p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._parameters.items()
        }
        kernel = "fused" if config.implementation == "auto" else config.implementation
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=kernel == "fused",
            foreach=kernel == "foreach",
        )
        self._foreach = kernel == "foreach"
        self._allocate(step_on_device=kernel == "fused")
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(self._accumulate(self._masters[name]))

    def _allocate(self, *, step_on_device: bool) -> None:
        """Gradients and state exist before the first step, so that memory does not jump at its end."""
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
            device = master.device if step_on_device else torch.device("cpu")
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                **{moment: torch.zeros_like(master) for moment in _MOMENTS},
            }

    @staticmethod
    def _accumulate(master: nn.Parameter) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None and master.grad is not None
            master.grad.add_(parameter.grad)
            parameter.grad = None

        return add

    def zero_grad(self) -> None:
        """Set all gradients to zero, keeping their memory."""
        for master in self._masters.values():
            if master.grad is not None:
                master.grad.zero_()

    def clip(self, max_norm: float | None) -> Tensor:
        """Norm of the whole gradient before clipping, a float32 scalar on the device; clips if `max_norm` is given."""
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=self._foreach)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self._masters.values(), max_norm, norm, foreach=self._foreach)
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One update at rate `lr`. Returns how many weights took a new value, an int64 scalar on the device."""
        before = {n: p.clone() for n, p in self._parameters.items() if self._masters[n] is p}
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        changed = []
        for name, parameter in self._parameters.items():
            if name in before:
                changed.append((parameter != before.pop(name)).sum())
            else:
                rounded = self._masters[name].to(parameter.dtype)
                changed.append((parameter != rounded).sum())
                parameter.copy_(rounded)
        return torch.stack(changed).sum()

    def count_weights(self) -> int:
        """Trainable weights."""
        return sum(p.numel() for p in self._parameters.values())

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resumed run needs: masters (or weights), moments, update counts. Not copies."""
        tensors = {}
        for name, master in self._masters.items():
            state = self._adamw.state[master]
            tensors[f"master/{name}"] = master.detach()
            tensors[f"step/{name}"] = state["step"]
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = state[moment]
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_tensors`; the weights become the rounding of their masters."""
        for name, own in self.state_tensors().items():
            own.copy_(tensors[name])
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])
