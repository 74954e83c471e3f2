"""The memory ledger: every storage born and dying in a stretch of code, on real or on meta tensors.

Owns the count of bytes, what they are for, where and when they were born, what was alive at the peak, and a cap that
makes a card of any size out of any CPU. Must not know the step, the allocator's rounding, nor how a peak is predicted.

It sees what torch dispatches. It does not see what a kernel allocates for itself, what a compiled graph does inside,
memory that never was a torch operation's output (`torch.from_numpy`), tensor subclasses that dispatch to tensors of
their own (DTensor), and storages older than the ledger unless they are registered.

Threads: torch hands dispatch modes on to the threads of its autograd engine, and the caller waits for them, so
backward is seen on CUDA too. Other threads are not seen.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

UPDATE_PHASE = "update"
"""New storages of this phase are the optimizer's scratch; its state is registered."""
NO_PHASE = "other"
_ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of every AccumulateGrad node


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
    """One storage. `category` and `module` are those last reported: a gradient is one from its birth on.

    Attributes:
        nbytes: its size, the last one if it was resized.
        shape, dtype: of the tensor it was born with.
        module: path of the module whose forward or backward bore it, or the name it was registered with.
        op: the operation, `register` if older than the ledger.
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
    """Storages that differ only in their layer. `module` has a star for each layer's number; `nbytes` is their sum."""

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
    """What was alive after so many events, in `phase`: plain data. Groups come largest first."""

    events: int
    phase: str
    alive_bytes: int
    groups: tuple[Group, ...]

    def by_category(self) -> dict[Category, int]:
        """Bytes of each category that is there, in the order of `Category`."""
        sums = {category: sum(g.nbytes for g in self.groups if g.category is category) for category in Category}
        return {category: nbytes for category, nbytes in sums.items() if nbytes}


class Ledger:
    """Counts storages within `with ledger:`; deaths are noticed after it too. May be entered again.

    A new storage's category is the one opened with `category`, else the first of these rules that holds: born in the
    phase `update`, workspace; born in autograd's accumulation, gradients; at least two dimensions and the last as
    long as the vocabulary, logits; else activations. `register` and `register_gradients` name what they are given.

    Args:
        cap_bytes: the card's size. What would exceed it raises `torch.OutOfMemoryError` and is not counted.
        device_type: count storages of this kind of device only (`cuda`, `meta`, `cpu`); None: all.
        vocab_size: length of a row of logits; None: no storage is taken for logits.
        meta_item: what `Tensor.item()` says of a meta tensor, which has no values; converted to its dtype.
    """

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        device_type: str | None = None,
        vocab_size: int | None = None,
        meta_item: float = 1.0,
    ) -> None:
        self.cap_bytes = cap_bytes
        self.meta_item = meta_item
        self.alive_bytes = 0
        self.events: list[tuple[Storage, int]] = []
        """Births, resizes and deaths in order: the storage, and by how many bytes what is alive changed."""
        self._device_type = device_type
        self._vocab_size = vocab_size
        # By the storage's address; the weak reference is to an object that lives as long as the storage.
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], Storage]] = {}
        self._phases: list[tuple[int, str]] = [(0, NO_PHASE)]  # events before it, its name
        self._category: Category | None = None
        self._modules: list[str] = []  # paths of the modules whose forward is running
        # Which module's forward was running when autograd numbered its nodes: from each number on, this module.
        self._node_numbers: list[int] = []
        self._node_modules: list[str] = []
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        self._cleanup.enter_context(_Dispatch(self))
        self._cleanup.enter_context(_storage_resizes(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()
        self._modules.clear()

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
        """Count the storages of these tensors from now on, and name those counted already; a storage counts once.

        Raises:
            torch.OutOfMemoryError: they exceed the cap.
        """
        for name, tensor in named:
            self._birth(tensor, "register")
            self._name(name, tensor, Category(category))

    def register_gradients(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Know gradients by identity: those that parameters have now, and those that reach them until the ledger exits.

        A gradient that autograd hands to a parameter and to an activation alike (the bias of a sum of equal shapes)
        counts as a gradient.
        """
        for name, parameter in named_parameters:
            if parameter.grad is not None:
                self.register([(name, parameter.grad)], Category.GRADIENTS)
            if parameter.requires_grad:
                hook = partial(self._name, name, category=Category.GRADIENTS)
                self._cleanup.callback(parameter.register_hook(hook).remove)

    def watch(self, model: nn.Module, prefix: str = "") -> None:
        """Note the module path of births in `model`, until the ledger exits; `prefix` tells two models apart.

        Backward's births get the module whose forward made the autograd node, also with non-reentrant checkpointing
        (the recomputation too). With reentrant checkpointing backward's births have no path.
        """
        for name, module in model.named_modules(prefix=prefix):
            enter = module.register_forward_pre_hook(partial(self._enter_module, name))
            leave = module.register_forward_hook(partial(self._leave_module, name), always_call=True)
            self._cleanup.callback(enter.remove)
            self._cleanup.callback(leave.remove)

    def restart(self) -> None:
        """Forget the past: events begin again with what is alive. Between steps, not between forward and backward."""
        self.events = [(record, record.nbytes) for _, record in self._known.values()]
        self._phases = [(0, self._phases[-1][1])]
        self._node_numbers, self._node_modules = [], []

    def timeline(self) -> list[int]:
        """Bytes alive before the first event and after each one."""
        return list(accumulate((change for _, change in self.events), initial=0))

    def snapshot(self, events: int | None = None) -> Snapshot:
        """What is alive now, or was after the first so many events; its phase is that of the last of them."""
        at = len(self.events) if events is None else events
        sizes: dict[Storage, int] = defaultdict(int)
        for storage, change in self.events[:at]:
            sizes[storage] += change
        members: dict[tuple[Any, ...], list[Storage]] = defaultdict(list)
        for storage, nbytes in sizes.items():
            if nbytes:
                place = re.sub(r"\b\d+\b", "*", storage.module)
                dtype = str(storage.dtype).removeprefix("torch.")
                members[storage.shape, dtype, storage.category, place].append(storage)
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
        """Count the tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or (self._device_type is not None and tensor.device.type != self._device_type):
            return
        nbytes = storage.nbytes()
        self._check_cap(nbytes)
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        shape, phase = tensor.shape, self._phases[-1][1]
        category = self._category or self._rule(shape, phase, number)
        module = self._modules[-1] if self._modules else self._module_of_node(number)
        record = Storage(nbytes, shape, tensor.dtype, category, phase, module, op)
        self._known[key] = weakref.ref(storage, partial(self._death, key, record)), record
        self._event(record, nbytes)

    def _death(self, key: int, record: Storage, _: object) -> None:
        del self._known[key]
        self._event(record, -record.nbytes)

    def _resize(self, storage: UntypedStorage, nbytes: int) -> None:
        """Count a known storage's new size. Raises before it counts."""
        if storage._cdata in self._known:
            record = self._known[storage._cdata][1]
            change = nbytes - record.nbytes
            if change:
                self._check_cap(change)
                record.nbytes = nbytes
                self._event(record, change)

    def _event(self, record: Storage, change: int) -> None:
        # A garbage collection may run deaths between any two lines: each of these is whole in itself.
        self.events.append((record, change))
        self.alive_bytes += change

    def _check_cap(self, nbytes: int) -> None:
        if self.cap_bytes is None or nbytes <= max(self.cap_bytes - self.alive_bytes, 0):
            return
        used, free = _size(self.alive_bytes), _size(max(self.cap_bytes - self.alive_bytes, 0))
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU 0 has a total capacity of "
            f"{_size(self.cap_bytes)} of which {free} is free. Including non-PyTorch memory, this process has {used} "
            f"memory in use. Of the allocated memory {used} is allocated by PyTorch, and 0 bytes is reserved by "
            "PyTorch but unallocated. (A card simulated by grpofit's memory ledger.)"
        )

    def _rule(self, shape: torch.Size, phase: str, node_number: int) -> Category:
        if phase == UPDATE_PHASE:
            return Category.WORKSPACE
        if node_number == _ACCUMULATE_GRAD:
            return Category.GRADIENTS
        return Category.LOGITS if len(shape) > 1 and shape[-1] == self._vocab_size else Category.ACTIVATIONS

    def _name(self, name: str, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        # A gradient may be expanded from a smaller tensor, which it is not; autograd copies it.
        if storage._cdata in self._known and storage.nbytes() >= tensor.nbytes:
            record = self._known[storage._cdata][1]
            record.category, record.module = category, name

    def _enter_module(self, path: str, *_: object) -> None:
        self._modules.append(path)
        self._mark_nodes()

    def _leave_module(self, path: str, *_: object) -> None:
        # An interruption that is no Exception runs no hooks: what it left on the stack goes too.
        while self._modules and self._modules.pop() != path:
            pass
        self._mark_nodes()

    def _mark_nodes(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputing: backward goes on with the first forward's nodes, and other threads number anew
        number, path = torch._C._autograd._get_sequence_nr(), self._modules[-1] if self._modules else ""
        if self._node_numbers and self._node_numbers[-1] == number:
            self._node_modules[-1] = path
        else:
            self._node_numbers.append(number)
            self._node_modules.append(path)

    def _module_of_node(self, number: int) -> str:
        at = bisect_right(self._node_numbers, number) - 1
        return self._node_modules[at] if at >= 0 and number != _ACCUMULATE_GRAD else ""


_VIEWS = "views of storages that exist"
_WRITTEN = "arguments written to, whose storages may have been resized"
_NEW = "new storages, in general"
_COMPOSITE = "of several operations, which arrive in one piece under inference mode only"

# What an operation returns, and its name. Here, where the schema says something else: a view that autograd is to take
# for a copy, and the call by which the storage of `torch.tensor` first appears.
_OPERATIONS: dict[OpOverload, tuple[str, str]] = {
    torch.ops.aten._unsafe_view.default: (_VIEWS, "aten._unsafe_view"),
    torch.ops.aten.lift_fresh.default: (_NEW, "aten.lift_fresh"),
}


def _operation(func: OpOverload) -> tuple[str, str]:
    if func not in _OPERATIONS:
        aliases = [value.alias_info for value in func._schema.returns]
        returns = _VIEWS if any(alias is not None for alias in aliases) else _NEW
        if any(alias is not None and alias.is_write for alias in aliases):
            returns = _WRITTEN
        _OPERATIONS[func] = (_COMPOSITE if func._can_decompose() and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), 'CPU') else returns, str(func.overloadpacket))
    return _OPERATIONS[func]


class _Dispatch(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns, name = _operation(func)
        if returns is _COMPOSITE:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.tensor(self._ledger.meta_item).to(args[0].dtype).item()
        if func is torch.ops.aten.add.Tensor and torch._C._current_autograd_node() is not None and not torch.is_grad_enabled():
            a=args[0]
            if a._use_count()==4 and torch._C._storage_Use_Count(a.untyped_storage()._cdata)==2 and a.untyped_storage().nbytes()==a.nbytes:
                return a.add_(args[1])
        out = func(*args, **(kwargs or {}))
        if returns is not _VIEWS:
            self._see(out, returns, name)
        return out

    def _see(self, out: Any, returns: str, name: str) -> None:
        if isinstance(out, (tuple, list)):
            for item in out:
                self._see(item, returns, name)
        elif isinstance(out, Tensor) and returns is _NEW:
            self._ledger._birth(out, name)
        elif isinstance(out, Tensor):
            storage = out.untyped_storage()
            try:
                self._ledger._resize(storage, storage.nbytes())
            except torch.OutOfMemoryError:
                storage.resize_(self._ledger._known[storage._cdata][1].nbytes)  # the tensor keeps its new shape
                raise


@contextmanager
def _storage_resizes(ledger: Ledger) -> Iterator[None]:
    """Resizing a storage itself is no operation and is not dispatched."""
    original = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, size: int) -> Any:
        ledger._resize(storage, size)
        return original(storage, size)

    UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = original  # type: ignore[method-assign]


def _size(nbytes: int) -> str:
    """As the CUDA allocator prints it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
