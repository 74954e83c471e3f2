"""The ledger on small graphs, on meta and on real tensors: timelines, categories and paths by hand, the cap."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpofit.memory.ledger import Category, Ledger

WEIGHTS, GRADIENTS, ACTIVATIONS, LOGITS, KV_CACHE = (
    Category.WEIGHTS, Category.GRADIENTS, Category.ACTIVATIONS, Category.LOGITS, Category.KV_CACHE,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Deaths must be noticed without it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


def changes(ledger: Ledger) -> list[tuple[str, int]]:
    return [(storage.op.removeprefix("aten."), change) for storage, change in ledger.events]


# Births, deaths, views


def test_timeline_by_hand():
    with Ledger() as ledger:
        a = torch.empty(100)
        b = a * 2
        view = b.view(10, 10)
        del a, b
        c = view.double()
        del view, c
    assert ledger.timeline() == [0, 400, 800, 400, 1200, 800, 0]
    assert ledger.peak().alive_bytes == 1200
    assert ledger.peak().events == 4
    assert [str(group) for group in ledger.peak().groups] == [
        "1 x [10, 10] float64 activations",
        "1 x [100] float32 activations",
    ]
    assert ledger.snapshot().groups == ()


def test_backward_by_hand():
    """y is saved for backward; the second gradient that reaches x is added to the first, as without a ledger."""
    with Ledger() as ledger:
        x = torch.empty(6, requires_grad=True)
        y = x.exp()
        z = (y * x).sum()
        del y
        z.backward()
    assert changes(ledger) == [
        ("empty", 24), ("exp", 24), ("mul", 24), ("sum", 4), ("mul", -24),
        ("ones_like", 4),
        ("mul", 24), ("mul", 24),  # gradients of both factors
        ("mul", 24), ("mul", -24), ("exp", -24),  # y's becomes x's through exp, which lets go of y
        ("mul", -24),  # added to the first
        ("ones_like", -4),
    ]  # fmt: skip
    assert ledger.alive_bytes == x.nbytes + x.grad.nbytes + z.nbytes


NOTHING_NEW: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(2, 6),
    "reshape": lambda x: x.reshape(12),
    "expand": lambda x: x.expand(5, 3, 4),
    "slice": lambda x: x[1:, ::2],
    "split": lambda x: x.split(2),
    "unbind": lambda x: x.unbind(),
    "detach": lambda x: x.detach(),
    "parameter": nn.Parameter,
    "in place": lambda x: x.add_(1).mul_(x),
    "written to": lambda x: x[0].copy_(x[1]),
    "out": lambda x: torch.exp(x, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NOTHING_NEW)
def test_allocates_nothing(name, device):
    older = torch.ones(3, 4, device=device)
    with Ledger() as ledger:
        x = torch.empty(3, 4, device=device)
        for tensor in (x, older):
            result = NOTHING_NEW[name](tensor)
            assert ledger.timeline() == [0, 48]
        del x, tensor
        assert ledger.alive_bytes == 0, "the result is a view of the older tensor"
        del result


NEW: dict[str, tuple[Callable[[Tensor], Any], int]] = {  # bytes of the births, from float32 [3, 4]
    "clone": (lambda x: x.clone(), 48),
    "reshape of a transpose": (lambda x: x.t().reshape(12), 48),
    "dtype": (lambda x: x.to(torch.bfloat16), 24),
    "comparison": (lambda x: x > 0, 12),
    "two results": (lambda x: x.max(-1), 3 * 4 + 3 * 8),
    "list of results": (lambda x: torch._foreach_add([x, x[0]], 1.0), 48 + 16),
    "matmul of three dimensions": (lambda x: x.view(1, 3, 4) @ x.new_empty(4, 5), 80 + 60),
    "linear with a bias": (lambda x: nn.functional.linear(x, x.new_empty(7, 4), x.new_empty(7)), 112 + 28 + 84),
    "torch.tensor": (lambda x: torch.tensor([1.0, 2.0], device=x.device), 8),
    "out, resized from nothing": (lambda x: torch.exp(x, out=x.new_empty(0)), 48),
    "in bfloat16": (lambda x: x.new_empty(3, 4, dtype=torch.bfloat16).add_(x.bfloat16()), 24 + 24),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NEW)
def test_allocates(name, device):
    function, nbytes = NEW[name]
    x = torch.ones(3, 4, device=device)
    with Ledger() as ledger:
        result = function(x)
    assert sum(change for _, change in ledger.events if change > 0) == nbytes
    del result
    assert ledger.alive_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_resizes(device):
    with Ledger(cap_bytes=100) as ledger:
        x = torch.empty(5, device=device)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(80)
        x.resize_(3)  # the storage stays
        x.resize_(25)
        with pytest.raises(torch.OutOfMemoryError):
            x.untyped_storage().resize_(101)
        assert x.untyped_storage().nbytes() == 100
        x.untyped_storage().resize_(4)
        del x
    assert ledger.timeline() == [0, 20, 0, 80, 100, 4, 0]


ACTIONS = st.sampled_from(["new", "view", "copy", "write", "resize", "drop"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 30)), max_size=25))
def test_any_sequence(steps):
    """Against the distinct storages of a list of tensors."""
    tensors: list[Tensor] = []
    with Ledger() as ledger:
        for action, n in steps:
            if action == "new" or not tensors:
                tensors.append(torch.empty(n, dtype=torch.uint8))
            elif action == "drop":
                del tensors[n % len(tensors)]
            else:
                x = tensors[n % len(tensors)]
                if action == "resize":
                    x.untyped_storage().resize_(x.untyped_storage().nbytes() + n)
                elif action == "write":
                    x.fill_(n)
                else:
                    tensors.append(x.clone() if action == "copy" else x[: n // 2])
                del x
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            assert ledger.alive_bytes == sum(sizes.values()) == ledger.timeline()[-1]
        tensors.clear()
        assert ledger.alive_bytes == 0


def test_deaths_after_the_ledger_and_births_not_before_it_is_back():
    with Ledger() as ledger:
        x = torch.empty(10)
    del x
    unseen = torch.empty(10)
    assert ledger.timeline() == [0, 40, 0]
    with ledger:
        y = unseen.exp()
    assert ledger.timeline() == [0, 40, 0, 40]
    del y
    with ledger:
        assert unseen[[0, 1, 3]].numel() == 3  # makes a tensor of its indices
    assert ledger.timeline() == [0, 40, 0, 40, 0, 24, 24 + 12, 12, 0]
    original = torch.tensor
    with Ledger() as outer, Ledger() as inner:
        z = torch.tensor([1, 2])
        assert torch.tensor is not original
    assert torch.tensor is original
    assert outer.timeline() == inner.timeline() == [0, 16]
    del z


def test_device_type():
    with Ledger(device_type="meta") as ledger:
        on_card, on_host = torch.empty(10, device="meta"), torch.empty(10)
        assert ledger.alive_bytes == 40
        del on_host
    assert ledger.timeline() == [0, 40]
    del on_card


# The cap


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_cap_to_the_byte(device):
    with Ledger(cap_bytes=400) as ledger:
        x = torch.empty(60, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(161, dtype=torch.uint8, device=device)
        assert ledger.alive_bytes == 240
        y = torch.empty(160, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            x.gt(0)
        with pytest.raises(torch.OutOfMemoryError):
            ledger.register([("weight", torch.empty(1, device=device))], WEIGHTS)
        z = torch.empty(0, device=device)
        del x, y, z
        assert ledger.alive_bytes == 0
        torch.empty(100, device=device)
    assert ledger.peak().alive_bytes == 400


def test_message_is_that_of_the_cuda_allocator():
    gib = 2**30
    with Ledger(cap_bytes=2 * gib) as ledger:
        kept = torch.empty(3 * gib // 2, dtype=torch.uint8, device="meta")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(gib // 4, dtype=torch.float32, device="meta")
    assert ledger.alive_bytes == kept.nbytes
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB of which 0.50 GiB is "
        "free. Including non-PyTorch memory, this process has 1.50 GiB memory in use. Of the allocated memory 1.50 GiB "
        "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )


# What and where


def test_categories_by_hand():
    """Logits of 6 tokens over 50 words: x [6, 8] saved, logits and log-softmax [6, 50], gradients of both sides."""
    weight = nn.Parameter(torch.ones(50, 8))
    with Ledger(vocab_size=50) as ledger:
        ledger.register([("head.weight", weight)], WEIGHTS)
        ledger.register_gradients([("head.weight", weight)])
        with ledger.category("KV cache"):
            cache = torch.empty(5, 8)
        with ledger.phase("forward"):
            x = torch.empty(6, 8)
            loss = (x @ weight.t()).log_softmax(-1).sum()
        with ledger.phase("backward"):
            loss.backward()
    forward, backward = ledger.by_phase()["forward"], ledger.by_phase()["backward"]
    assert forward.by_category() == {WEIGHTS: 1600, ACTIVATIONS: 192, LOGITS: 2400, KV_CACHE: 160}
    # Log-softmax is gone when the weight's gradient comes; the loss and its gradient are 4 bytes each.
    assert backward.by_category() == {
        WEIGHTS: 1600, GRADIENTS: 1600, ACTIVATIONS: 192 + 8, LOGITS: 1200, KV_CACHE: 160,
    }  # fmt: skip
    assert ledger.snapshot().by_category()[GRADIENTS] == 1600
    del cache


def test_gradients_taken_away_and_expanded_ones():
    """As `MasterAdamW` takes them; and the gradient of a sum is one number, which autograd copies for the parameter."""
    tied, plain = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), nn.Parameter(torch.ones(8))
    tied.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with Ledger() as ledger:
        ledger.register_gradients([("tied", tied), ("plain", plain), ("frozen", torch.ones(8))])
        (tied.exp().sum() + tied.sin().sum()).float().backward()
        plain.sum().backward()
    born = [s for s, change in ledger.events if change > 0 and s.category is GRADIENTS]
    assert [(s.module, s.nbytes) for s in born] == [("tied", 16), ("", 32)]
    assert ledger.snapshot().by_category() == {GRADIENTS: 32}
    with Ledger() as ledger:
        ledger.register_gradients([("tied", tied), ("plain", plain)])
    assert ledger.snapshot().by_category() == {GRADIENTS: 32}
    assert not tied._backward_hooks and not plain._backward_hooks


def test_phases():
    with Ledger() as ledger:
        with ledger.phase("step"):
            x = torch.empty(10)
            with ledger.phase("inner"):
                y = torch.empty(20)
                del y
            del x
            y = torch.empty(5)
        with ledger.phase("idle"):
            pass
        with pytest.raises(ZeroDivisionError), ledger.phase("inner"):
            y = torch.empty(1)
            raise ZeroDivisionError
    assert {name: (peak.phase, peak.alive_bytes) for name, peak in ledger.by_phase().items()} == {
        "step": ("step", 40), "inner": ("inner", 120), "idle": ("idle", 20),
    }  # fmt: skip
    assert ledger.peak().phase == "inner"
    ledger.restart()
    assert ledger.timeline() == [0, 4]
    del y
    assert ledger.alive_bytes == 0
    assert Ledger().peak().alive_bytes == 0
    with pytest.raises(ValueError, match="caches"), ledger.category("caches"):
        pass


@pytest.mark.parametrize("recompute", [False, True])
def test_module_paths(recompute):
    """Of forward, backward and recomputation; of an operation after all modules, and after a module that raised."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(4, 6), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.up(x)) * 2

    class Net(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
                x = y[:, :4].exp()
            return x

    net = Net([Block(), Block()])
    with Ledger() as ledger:
        ledger.watch(net, prefix="net")
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.ones(2, 5))
        ledger.restart()
        with ledger.phase("forward"):
            loss = net(torch.ones(2, 4)).sqrt().sum()
        with ledger.phase("backward"):
            loss.backward()
    born = [(s.phase, s.op, s.module) for s, change in ledger.events if change > 0]
    for i in (0, 1):
        for phase in ("forward", "backward") if recompute else ("forward",):
            assert (phase, "aten.addmm", f"net.{i}.up") in born
            assert (phase, "aten.tanh", f"net.{i}.gate") in born
        assert ("backward", "aten.mm", f"net.{i}.up") in born
        assert ("backward", "aten.tanh_backward", f"net.{i}.gate") in born
        assert ("backward", "aten.mul", f"net.{i}") in born
    assert ("backward", "aten.slice_backward", "net") in born
    assert ("forward", "aten.sqrt", "") in born
    assert ("backward", "aten.div", "") in born
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    groups = [str(group) for group in ledger.by_phase()["forward"].groups]
    assert recompute or "2 x [2, 6] float32 activations at net.*.gate" in groups


def test_item_on_meta():
    x = torch.empty(3, device="meta")
    with Ledger():
        assert x.sum().item() == 1.0
        assert bool((x > 0).any()) is True
    with Ledger(meta_item=7.0):
        count = (x > 0).sum().item()
        assert count == 7 and isinstance(count, int)
        assert torch.tensor(2.5).item() == 2.5


def test_backward_in_threads_of_the_engine():
    """Backward within backward beyond a depth of 60 goes on in other threads, as all of it does on CUDA."""
    threads, kept = set(), []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            threads.add(threading.get_ident())
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(3, requires_grad=True), ctx.depth - 1).sum().backward()
            else:
                kept.append(torch.empty(1000))
            return grad, None

    with Ledger() as ledger:
        Nested.apply(torch.ones(3, requires_grad=True), 70).sum().backward()
        assert len(threads) > 1
        assert ledger.alive_bytes == 4000
        kept.clear()
        assert ledger.alive_bytes == 0
