"""What backward computes again instead of keeping it: norms and MLPs, whole blocks, tiles of an MLP.

Owns how these levers act on any transformers decoder: by the blocks that transformers itself can checkpoint, and by
the parts of a block, found by their names and layers. Must not know what is trained, or how much memory there is.

Nothing here acts in evaluation mode or without gradients, that is, in rollouts and evaluations. What the layers pass
each other goes through untouched, objects included. No parameter is renamed or moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from grpofit.errors import ModelError

# Dropout is off and nothing else in a block draws, so the state of the generators need not be kept.
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

_MLP_NAMES = ("mlp", "feed_forward", "ffn")
_PROBE_TOKENS = 5
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def apply_recompute(
    model: PreTrainedModel, checkpointing: Literal["none", "selective", "full", "offload"], mlp_tile_tokens: int | None
) -> list[str]:
    """Make the model's training passes recompute; gradients change by rounding only.

    Args:
        model: a decoder-only model, its weights on their device.
        checkpointing: see `config.tree.MemoryConfig`.
        mlp_tile_tokens: tokens that pass through an MLP at once; None: all, and MLPs are left as they are.

    Returns:
        What a user should be told: where a lever has no effect or could not be used.

    Raises:
        ModelError: the architecture has no blocks that could be checkpointed.
    """
    blocks = _blocks(model)
    if checkpointing != "none" and not blocks:
        raise ModelError(
            f"memory.checkpointing: {checkpointing} cannot be used with this architecture",
            values=f"{type(model).__name__}, model type {model.config.model_type}",
            why="none of its layers is one that transformers can checkpoint, so nothing would be recomputed",
            fix="--set memory.checkpointing=none, or choose another model",
        )
    tiled, notes = (set(), []) if mlp_tile_tokens is None else _tile_mlps(blocks, mlp_tile_tokens)
    if checkpointing == "selective":
        for block in blocks:
            _recompute_parts(block, tiled)
    elif checkpointing == "full":
        _recompute_blocks(model, _checkpoint)
    elif checkpointing == "offload":
        on_host = model.device.type == "cpu"
        _recompute_blocks(model, _checkpoint if on_host else HostCopies(model.device).checkpoint)
        if on_host:
            notes.append("memory.checkpointing: on the CPU, offload does what full does")
    return notes


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# Blocks and their parts


def _recompute_blocks(model: PreTrainedModel, around: Callable[..., Any]) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()  # only the reentrant kind needs embeddings that ask for a gradient
    for block in _blocks(model):
        block._gradient_checkpointing_func = around  # type: ignore[assignment]


def _recompute_parts(block: nn.Module, tiled: set[nn.Module]) -> None:
    """Norms and MLPs, which keep most bytes for their time: an MLP keeps tensors of its inner width, a norm written
    in Python float32 ones. A fused attention keeps little, and to recompute it costs more the longer the rows."""
    for name, module in block.named_modules():
        kind = type(module).__name__
        if ("Norm" in kind and not isinstance(module, nn.LayerNorm)) or (name in _MLP_NAMES and module not in tiled):
            _replace_forward(module, _recomputed)
        elif kind.endswith("Attention"):
            _replace_forward(module, _recomputed_if_eager)


def _recomputed(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpoint(plain, module, *args, **kwargs)


def _recomputed_if_eager(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Eager attention keeps scores of the rows' length squared. Asked at each call: packed rows bring their own."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager":
        return _checkpoint(plain, module, *args, **kwargs)
    return plain(module, *args, **kwargs)


def _replace_forward(module: nn.Module, by: Callable[..., Any]) -> None:
    """In training, `by(forward, module, ...)` takes the place of `forward(module, ...)`.

    A bound method, so that a deep copy of the model is bound to the copy.
    """
    bound: Any = module.forward
    plain = bound.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return by(plain, self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    module.forward = MethodType(forward, module)


# Block inputs in host memory


class HostCopies:
    """Keeps the inputs of checkpointed blocks in pinned host memory, copied beside the computation.

    Each comes back while backward works on the block after it, so that at most two are on the device. On the CPU the
    copies are plain ones, so that everything but the streams can be tested there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[weakref.ref[_HostCopy]] = []  # in the order of forward; autograd owns them

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`torch.utils.checkpoint`; inside, blocks keep nothing, so that only their inputs reach the hooks."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return _checkpoint(function, *args, **kwargs)

    def _pack(self, tensor: Tensor) -> Tensor | _HostCopy:
        if not tensor.requires_grad:  # masks and positions, which all blocks share
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
        with self._beside():
            host.copy_(tensor.detach(), non_blocking=True)
        if self._stream is not None:
            tensor.record_stream(self._stream)  # its memory is not given away before it is copied
        copy = _HostCopy(host)
        self._held.append(weakref.ref(copy))
        return copy

    def _unpack(self, packed: Tensor | _HostCopy) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = self._fetch(packed)
        if self._stream is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._stream)
            tensor.record_stream(now)
        packed.fetched = None
        while self._held and self._held[-1]() in (packed, None):
            self._held.pop()
        if self._held and (before := self._held[-1]()) is not None:
            self._fetch(before)
        return tensor

    def _fetch(self, copy: _HostCopy) -> Tensor:
        if copy.fetched is None:
            with self._beside(after_computation=False):
                copy.fetched = copy.host.to(self._device, non_blocking=True, copy=True)
        return copy.fetched

    def _beside(self, *, after_computation: bool = True) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        if after_computation:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class _HostCopy:
    """A tensor in host memory, and on the device from shortly before it is used."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.fetched: Tensor | None = None


# Tiles of an MLP


def _tile_mlps(blocks: list[nn.Module], tile_tokens: int) -> tuple[set[nn.Module], list[str]]:
    """The MLPs that now pass in tiles, and notes on the others."""
    mlps = [child for block in blocks for name, child in block.named_children() if name in _MLP_NAMES]
    tiled = {mlp for mlp in mlps if _treats_tokens_alone(mlp)}
    for mlp in tiled:
        _replace_forward(mlp, partial(_tiled, tile_tokens))
    if not mlps:
        return tiled, ["memory.mlp_tile_tokens has no effect: this architecture's blocks have no MLP of their own"]
    left = sorted({type(mlp).__name__ for mlp in mlps if mlp not in tiled})
    why = "not known to be a function of each token alone, made of linear layers"
    return tiled, [f"memory.mlp_tile_tokens has no effect on {', '.join(left)}: {why}"] if left else []


@torch.no_grad()
def _treats_tokens_alone(mlp: nn.Module) -> bool:
    """Whether all its weights are in linear layers, and tokens one by one give what they give together."""
    owners = [module for module in mlp.modules() if next(module.parameters(recurse=False), None) is not None]
    if not owners or not all(isinstance(owner, (nn.Linear, Conv1D)) for owner in owners):
        return False
    first: Any = owners[0]
    width: int = first.in_features if isinstance(first, nn.Linear) else first.weight.shape[0]
    weight: Tensor = first.weight
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    hidden = torch.linspace(-1, 1, _PROBE_TOKENS * width, device=weight.device).to(dtype).view(1, -1, width)
    try:
        together = mlp(hidden)
        alone = torch.cat([mlp(token) for token in hidden.split(1, dim=1)], dim=1)
    except (TypeError, ValueError, RuntimeError):  # it takes more than hidden states, or returns more than a tensor
        return False
    if together.shape != hidden.shape:
        return False
    return hidden.is_meta or bool(
        (together - alone).float().norm() <= _PROBE_TOLERANCE.get(dtype, 1e-4) * together.float().norm()
    )


def _tiled(
    tile_tokens: int, plain: Callable[..., Any], mlp: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    tiles = _Tiles(plain, mlp, tile_tokens, args, kwargs)
    marked = _TileGradients.apply(hidden, tiles, *tiles.weights())  # type: ignore[no-untyped-call]
    output: Tensor = _TileOutputs.apply(marked, tiles)  # type: ignore[no-untyped-call]
    return output


class _Tiles(nn.Module):
    """An MLP that is called tile by tile, past the forward that was put in its place."""

    def __init__(
        self, plain: Callable[..., Any], mlp: nn.Module, tile_tokens: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self.mlp = mlp
        self._plain, self._tokens, self._args, self._kwargs = plain, tile_tokens, args, kwargs

    def weights(self) -> list[Tensor]:
        """Those that are trained."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def forward(self, tile: Tensor) -> Tensor:
        """[1, n, H] -> [1, n, H]."""
        output: Tensor = self._plain(self.mlp, tile, *self._args, **self._kwargs)
        return output

    def split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[B, S, H] -> tiles [1, n, H]; views where `hidden` is contiguous."""
        tiles: tuple[Tensor, ...] = hidden.reshape(1, -1, hidden.shape[-1]).split(self._tokens, dim=1)
        return tiles

    def gradients(self, tile: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
        """Of a tile, and of the weights. Autograd is given aliases of them, or it would run the weights' own hooks."""
        inner = tile.detach().requires_grad_()
        aliases = {
            name: weight.detach().requires_grad_() for name, weight in self.named_parameters() if weight.requires_grad
        }
        with torch.enable_grad():
            output = functional_call(self, aliases, (inner,))
        grads: tuple[Tensor, ...] = torch.autograd.grad(output, [inner, *aliases.values()], grad_output)
        return grads


class _TileGradients(torch.autograd.Function):
    """First half of a tiled MLP: passes hidden states [B, S, H] on, and computes every gradient of the MLP.

    Its output stands for the MLP's, whose gradient it is given. The halves are two functions so that a checkpointed
    block, which recomputes until it has what backward needs, stops here: what comes after keeps nothing.

    Gradients of the weights add up over the tiles in float32 and are rounded once, as in one large product; autograd
    would round after each tile.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tiles: _Tiles, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, *weights)  # the weights, so that a change in between is noticed
        ctx.tiles = tiles
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        sums: list[Tensor] = []
        parts = [ctx.tiles.split(tensor) for tensor in (hidden, grad_output, grad_hidden)]
        for tile, grad, place in zip(*parts, strict=True):
            grad_tile, *grads = ctx.tiles.gradients(tile, grad)
            place.copy_(grad_tile)
            if not sums:
                wide = len(parts[0]) > 1
                sums = [grad.to(torch.promote_types(grad.dtype, torch.float32)) if wide else grad for grad in grads]
                continue
            for total, added in zip(sums, grads, strict=True):
                total.add_(added)
        return (
            grad_hidden if ctx.needs_input_grad[0] else None,
            None,
            *(total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)),
        )


class _TileOutputs(torch.autograd.Function):
    """Second half of a tiled MLP: its output [B, S, H], tile by tile; keeps nothing, see `_TileGradients`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tiles: _Tiles) -> Tensor:
        return torch.cat([tiles(tile) for tile in tiles.split(hidden)], dim=1).view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None
