"""The memory ledger: every storage born and dying in a stretch of code, on real or on meta tensors.

Owns the count of bytes, what they are for, where and when they were born, what was alive at the peak, and a cap that
makes a card of any size out of any CPU. Must not know the step, the allocator's rounding, nor how a peak is predicted.

It sees what torch dispatches, from every thread of autograd's engine, which takes dispatch modes over. It does not see
what a kernel or a compiled graph allocates inside (nor, under `torch.inference_mode`, a composite operation), what
never was an operation's output (`torch.from_numpy`), tensors inside of tensor subclasses (DTensor), other threads,
and storages older than itself unless they are registered.
"""

from __future__ import annotations

import re
import sys
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from grpofit.units import gib

NO_PHASE = "other"
UPDATE_PHASE = "update"
_ACCUMULATE_GRAD = 2**64 - 1  # the number that autograd gives to each node which adds to a parameter's gradient


class Category(StrEnum):
    """What a storage is for."""

    WEIGHTS = "weights"
    ADAPTER = "adapter"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    KV_CACHE = "KV cache"
    WORKSPACE = "workspace"


@dataclass(eq=False, slots=True)
class Storage:
    """One storage, with shape and dtype of the tensor it was born with.

    `nbytes`, `category` and `module` are the last ones known: what becomes a gradient is one from its birth on.
    `module` is the path of the module whose forward or backward bore it, or the name it was registered with.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: Category
    phase: str
    module: str
    op: str


@dataclass(frozen=True, slots=True)
class Group:
    """Storages that differ in their layer only. `module` has a star for a layer's number; `nbytes` is their sum."""

    count: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: Category
    module: str
    ops: tuple[str, ...]

    def __str__(self) -> str:
        place = f" at {self.module}" if self.module else ""
        return f"{self.count} x {list(self.shape)} {self.dtype} {self.category}{place}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was alive after the first `events` events: plain data. Groups come largest first."""

    events: int
    phase: str
    alive_bytes: int
    groups: tuple[Group, ...]

    def by_category(self) -> dict[Category, int]:
        """Bytes of each category that is there, in the order of `Category`."""
        sums = {category: sum(g.nbytes for g in self.groups if g.category is category) for category in Category}
        return {category: nbytes for category, nbytes in sums.items() if nbytes}


@dataclass(kw_only=True, eq=False)
class Ledger:
    """Counts births within `with ledger:`, and deaths of what it counted after it too. May be entered again.

    A new storage's category is the one opened with `category`, else by the first of these rules that holds: born in
    the phase `update`, workspace; in autograd's sum of a parameter's gradient, gradients; at least two dimensions and
    the last one `vocab_size`, logits; else activations. What `register` and `register_gradients` say stands over it.

    Args:
        cap_bytes: the card's size. What would exceed it raises `torch.OutOfMemoryError` and is not counted.
        device_type: count storages of this kind of device only (`cuda`, `meta`, `cpu`); None: all.
        vocab_size: length of a row of logits; None: nothing is taken for logits.
        meta_item: what `Tensor.item()` says of a meta tensor, which has no values; converted to its dtype.
    """

    cap_bytes: int | None = None
    device_type: str | None = None
    vocab_size: int | None = None
    meta_item: float = 1.0

    def __post_init__(self) -> None:
        self.alive_bytes = 0
        self.events: list[tuple[Storage, int]] = []
        """Births, resizes and deaths in order: the storage, and by how many bytes it changed what is alive."""
        # By the storage's address. A weak reference to a storage's object lives as long as the storage itself.
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], Storage]] = {}
        self._phases = [(0, NO_PHASE)]  # number of events before it, its name
        self._category: Category | None = None
        self._modules = [""]  # paths of the modules whose forward is running
        self._nodes = [(-1, "")]  # autograd numbers its nodes in order: from each of these on, they are this module's
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        _sole_holders()  # measured before the ledger listens
        self._cleanup.enter_context(_beside_dispatch(self, self._cleanup.enter_context(_Dispatch(self))))
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()
        del self._modules[1:]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of what happens inside; an inner phase interrupts the outer one."""
        outer = self._phases[-1][1]
        self._phases.append((len(self.events), name))
        try:
            yield
        finally:
            self._phases.append((len(self.events), outer))

    @contextmanager
    def category(self, category: Category | str) -> Iterator[None]:
        """Give every storage born inside this category, whatever the rules say."""
        outer, self._category = self._category, Category(category)
        try:
            yield
        finally:
            self._category = outer

    def register(self, named: Iterable[tuple[str, Tensor]], category: Category | str) -> None:
        """Count these tensors' storages from now on (each once, within the cap), and name those counted already."""
        for name, tensor in named:
            self._birth(tensor, "register")
            self._name(name, tensor, Category(category))

    def register_gradients(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Know gradients by identity: those that parameters have now, and those that reach them until the ledger exits.

        A gradient of activations that autograd hands to a parameter unchanged counts as the parameter's.
        """
        for name, parameter in named_parameters:
            if parameter.grad is not None:
                self.register([(name, parameter.grad)], Category.GRADIENTS)
            if parameter.requires_grad:
                hook = partial(self._name, name, category=Category.GRADIENTS)
                self._cleanup.callback(parameter.register_hook(hook).remove)

    def watch(self, model: nn.Module, prefix: str = "") -> None:
        """Note the module path of births in `model`, until the ledger exits; `prefix` tells two models apart.

        Backward's births have the path of the module whose forward made the autograd node, recomputed ones that of
        the module recomputed. Under reentrant checkpointing backward's are wrong or missing.
        """
        for name, module in model.named_modules(prefix=prefix):
            enter = module.register_forward_pre_hook(partial(self._enter_or_leave, name))
            leave = module.register_forward_hook(partial(self._enter_or_leave, None), always_call=True)
            self._cleanup.callback(enter.remove)
            self._cleanup.callback(leave.remove)

    def restart(self) -> None:
        """Forget the past: events begin with what is alive. Between steps, not between a forward and its backward."""
        self.events = [(record, record.nbytes) for _, record in self._known.values()]
        self._phases = [(0, self._phases[-1][1])]
        del self._nodes[1:]

    def timeline(self) -> list[int]:
        """Bytes alive before the first event and after each one."""
        return list(accumulate((change for _, change in self.events), initial=0))

    def snapshot(self, events: int | None = None) -> Snapshot:
        """What is alive now, or was after so many events; its phase is that of the last of them."""
        at = len(self.events) if events is None else events
        sizes: dict[Storage, int] = defaultdict(int)
        for storage, change in self.events[:at]:
            sizes[storage] += change
        members: dict[tuple[tuple[int, ...], str, Category, str], list[Storage]] = defaultdict(list)
        for storage, nbytes in sizes.items():
            if nbytes:
                dtype, place = str(storage.dtype).removeprefix("torch."), re.sub(r"\b\d+\b", "*", storage.module)
                members[tuple(storage.shape), dtype, storage.category, place].append(storage)
        groups = [
            Group(len(alike), sum(sizes[s] for s in alike), *key, tuple(sorted({s.op for s in alike})))
            for key, alike in members.items()
        ]
        groups.sort(key=lambda group: -group.nbytes)
        phase = next((name for start, name in reversed(self._phases) if start < at), self._phases[0][1])
        return Snapshot(at, phase, sum(sizes.values()), tuple(groups))

    def peak(self) -> Snapshot:
        """What was alive when most was, the first time."""
        levels = self.timeline()
        return self.snapshot(levels.index(max(levels)))

    def by_phase(self) -> dict[str, Snapshot]:
        """The peak of each phase, in order of first appearance; what is alive when a phase begins counts in it."""
        levels = self.timeline()
        best: dict[str, int] = {}
        ends = [start for start, _ in self._phases[1:]] + [len(self.events)]
        for (start, phase), end in zip(self._phases, ends, strict=True):
            at = max(range(start, end + 1), key=levels.__getitem__)
            if (start < end or phase != NO_PHASE) and (phase not in best or levels[at] > levels[best[phase]]):
                best[phase] = at
        return {phase: replace(self.snapshot(at), phase=phase) for phase, at in best.items()}

    def _birth(self, tensor: Tensor, op: str) -> None:
        """Count the tensor's storage, unless it is known; the dispatch mode calls it. Raises before it counts."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or (self.device_type is not None and tensor.device.type != self.device_type):
            return
        self._check_cap(nbytes)
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        module, phase = self._modules[-1], self._phases[-1][1]
        if number is not None and not module:
            module = self._nodes[bisect_right(self._nodes, number, key=itemgetter(0)) - 1][1]
        category = self._category or self._rule(tensor.shape, phase, number)
        record = Storage(nbytes, tensor.shape, tensor.dtype, category, phase, module, op)
        self._known[key] = weakref.ref(storage, partial(self._death, key, record)), record
        self._event(record, nbytes)

    def _resize(self, storage: UntypedStorage, nbytes: int) -> None:
        """Count a known storage's new size. Raises before it counts."""
        record = self._known[storage._cdata][1] if storage._cdata in self._known else None
        if record is not None and (change := nbytes - record.nbytes):
            self._check_cap(change)
            record.nbytes = nbytes
            self._event(record, change)

    def _death(self, key: int, record: Storage, _: object) -> None:
        del self._known[key]
        self._event(record, -record.nbytes)

    def _event(self, record: Storage, change: int) -> None:
        # A garbage collection may run deaths between any two lines; each of these is whole in itself.
        self.events.append((record, change))
        self.alive_bytes += change

    def _check_cap(self, nbytes: int) -> None:
        if self.cap_bytes is not None and nbytes > max(self.cap_bytes - self.alive_bytes, 0):
            used, free = gib(self.alive_bytes), gib(max(self.cap_bytes - self.alive_bytes, 0))
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {gib(nbytes)}. GPU 0 has a total capacity of "
                f"{gib(self.cap_bytes)} of which {free} is free. Including non-PyTorch memory, this process has {used} "
                f"memory in use. Of the allocated memory {used} is allocated by PyTorch, and 0 bytes is reserved by "
                "PyTorch but unallocated. (A card simulated by grpofit's memory ledger.)"
            )

    def _name(self, name: str, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        # A gradient may be expanded from a smaller tensor, which it is not; autograd copies it.
        if storage._cdata in self._known and storage.nbytes() >= tensor.nbytes:
            record = self._known[storage._cdata][1]
            record.category, record.module = category, name

    def _rule(self, shape: torch.Size, phase: str, node_number: int | None) -> Category:
        if phase == UPDATE_PHASE:
            return Category.WORKSPACE
        if node_number == _ACCUMULATE_GRAD:
            return Category.GRADIENTS
        return Category.LOGITS if len(shape) > 1 and shape[-1] == self.vocab_size else Category.ACTIVATIONS

    def _enter_or_leave(self, path: str | None, *_: object) -> None:
        """A hook: forward of the module at `path` begins, or (None) that of the current one ends."""
        if path is None:
            self._modules.pop()
        else:
            self._modules.append(path)
        # Not when it is recomputed: backward goes on with the first forward's nodes, and its threads number anew.
        if torch._C._current_graph_task_id() == -1:
            self._nodes.append((torch._C._autograd._get_sequence_nr(), self._modules[-1]))


@contextmanager
def _beside_dispatch(ledger: Ledger, mode: TorchDispatchMode) -> Iterator[None]:
    """Two calls that are not dispatched: resizing a storage itself, and `torch.tensor` on meta."""
    resize, tensor = UntypedStorage.resize_, torch.tensor

    def counted_resize(storage: UntypedStorage, size: int) -> Any:
        ledger._resize(storage, size)
        return resize(storage, size)

    def counted_tensor(*args: Any, **kwargs: Any) -> Tensor:
        out = tensor(*args, **kwargs)
        if mode in _get_current_dispatch_mode_stack():  # else a meta kernel calls
            ledger._birth(out, "aten.lift_fresh")
        return out

    UntypedStorage.resize_, torch.tensor = counted_resize, counted_tensor  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_, torch.tensor = resize, tensor  # type: ignore[method-assign]


_ATEN = torch.ops.aten
_ITEM, _LIFT = _ATEN._local_scalar_dense.default, _ATEN.lift_fresh.default

# Under a dispatch mode, or on meta, autograd takes every tensor for a subclass and no longer writes in place where
# it could: when it adds up gradients, or scatters them into zeros. The ledger must not change what it measures.
_IN_PLACE = {
    _ATEN.add.Tensor: _ATEN.add_.Tensor,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
}
_VIEWS, _WRITTEN, _NEW = range(3)


@cache
def _operation(func: OpOverload) -> tuple[int, str, OpOverload | None]:
    """What it returns (views of what exists, arguments that it wrote to, or new tensors), name, in-place form."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    returns = _NEW if not aliases else _WRITTEN if any(alias.is_write for alias in aliases) else _VIEWS
    # By its schema `lift_fresh` gives a view, but with it the storage of a new constant first appears.
    return _NEW if func is _LIFT else returns, str(func.overloadpacket), _IN_PLACE.get(func)


class _Dispatch(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ITEM and args[0].is_meta:
            return torch.tensor(self._ledger.meta_item).to(args[0].dtype).item()
        returns, name, in_place = _operation(func)
        if in_place is not None and _holders(args[0], args[1]) == _sole_holders():
            return in_place(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if returns != _VIEWS:
            self._see(out, returns, name)
        return out

    def _see(self, out: Any, returns: int, name: str) -> None:
        if isinstance(out, (tuple, list)):
            for item in out:
                self._see(item, returns, name)
        elif isinstance(out, Tensor) and returns == _NEW:
            self._ledger._birth(out, name)
        elif isinstance(out, Tensor):
            self._ledger._resize(out.untyped_storage(), out.untyped_storage().nbytes())


def _holders(tensor: Any, other: Any) -> tuple[int, ...]:
    """How many hold a tensor that `other` could be added to, its storage and its Python object; () out of backward."""
    if torch._C._current_autograd_node() is None or torch.is_grad_enabled():
        return ()
    storage = tensor.untyped_storage()
    fits = not isinstance(other, Tensor) or (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
    if not fits or storage.nbytes() != tensor.nbytes:
        return ()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


@cache
def _sole_holders() -> tuple[int, ...]:
    """`_holders` of a sum of gradients that only autograd holds; the numbers differ between versions."""
    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(_holders(args[0], args[1]) if func in _IN_PLACE else ())
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad(), Listen():  # type: ignore[no-untyped-call]
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(x.exp() + x.sin(), x)
    return next((holders for holders in seen if holders), (-1,))
