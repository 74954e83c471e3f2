"""The ledger against timelines by hand, against torch's own allocator, on meta as on real tensors, and as a small card."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import pytest
import torch
from families import VOCAB_SIZE, build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpofit.algo.logprobs import chunked_logprobs
from grpofit.config import OptimConfig
from grpofit.memory.ledger import Category, Ledger
from grpofit.models.head import Head, token_logprobs
from grpofit.training.optim import MasterAdamW

WEIGHTS, GRADIENTS, OPTIMIZER = Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER
ACTIVATIONS, LOGITS, WORKSPACE = Category.ACTIVATIONS, Category.LOGITS, Category.WORKSPACE


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Deaths must be noticed without it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
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
    """y is saved for backward; the sum of the gradients that reach x goes into the first of them, as without a ledger."""
    with Ledger() as ledger:
        x = torch.empty(6, requires_grad=True)
        y = x.exp()
        z = (y * x).sum()
        del y
        z.backward()
    assert changes(ledger) == [
        ("empty", 24), ("exp", 24), ("mul", 24), ("sum", 4), ("mul", -24),
        ("ones_like", 4),
        ("mul", 24), ("mul", 24), ("ones_like", -4),  # gradients of x and of y, by the product
        ("mul", 24), ("exp", -24), ("mul", -24),  # of x by exp; y dies; the gradient of y
        ("mul", -24),  # added to the other
    ]  # fmt: skip
    assert ledger.alive_bytes == 24 + 24 + 4
    assert x.grad is not None


NOTHING_NEW: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(2, 6),
    "reshape": lambda x: x.reshape(12),
    "transpose": lambda x: x.t(),
    "expand": lambda x: x.expand(5, 3, 4),
    "slice": lambda x: x[1:, ::2],
    "split": lambda x: x.split(2),
    "unbind": lambda x: x.unbind(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "parameter": nn.Parameter,
    "in place": lambda x: x.add_(1).mul_(x),
    "filled": lambda x: x.uniform_(),
    "written to": lambda x: x[0].copy_(x[1]),
    "out": lambda x: torch.exp(x, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "contiguous": lambda x: x.contiguous(),
    "same dtype": lambda x: x.to(torch.float32),
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


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "view", "copy", "write", "resize", "drop"]), st.integers(0, 30)), max_size=25
    )
)
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
                    x.untyped_storage().resize_(n + x.numel())
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
    original = torch.tensor
    with Ledger() as outer, Ledger() as inner:
        z = torch.tensor([1, 2])
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


# A whole step: on meta as on the CPU, against torch's allocator, against other counts


class Step:
    """A tiny Llama and its optimizer, registered; `run` is one step of two micro batches of unequal length."""

    def __init__(self, device: str, *, dtype: torch.dtype = torch.bfloat16, recompute: bool = False, **options: Any):
        self.model = build_model("llama", attn_implementation="eager", tie_word_embeddings=True).to(dtype).to(device)
        if recompute:
            self.model.train()
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.device = device
        self.ledger = Ledger(vocab_size=VOCAB_SIZE, **options)
        self.head = Head(self.model.get_output_embeddings())
        with self.ledger:
            self.optimizer = self._optimizer("loop", dtype)

    def _optimizer(self, implementation: str, dtype: torch.dtype) -> MasterAdamW:
        with self.ledger.category(GRADIENTS):  # masters and moments are named after it
            config = OptimConfig(implementation=implementation)
            optimizer = MasterAdamW(self.model.named_parameters(), config, master=dtype != torch.float32)
        self.ledger.register(optimizer.state_tensors().items(), OPTIMIZER)
        self.ledger.register([*self.model.named_parameters(), *self.model.named_buffers()], WEIGHTS)
        return optimizer

    def forward_backward(self, rows: int, length: int) -> None:
        with self.ledger.phase("batch"):
            ids = torch.tensor([list(range(length))] * rows, device=self.device)
            positions = torch.arange(length, device=self.device).expand(rows, -1)
            index = torch.arange(rows * length - 1, device=self.device)
        with self.ledger.phase("forward"):
            logprobs, entropy = token_logprobs(
                self.model, self.head, ids, positions, index, ids.flatten()[1:],
                temperature=0.9, chunk_tokens=7, with_entropy=True,
            )  # fmt: skip
        with self.ledger.phase("backward"):
            logprobs.mean().backward()
        del entropy

    def run(self, rows: int = 2) -> None:
        with self.ledger:
            self.ledger.watch(self.model)
            self.ledger.register_gradients(self.model.named_parameters())
            self.optimizer.zero_grad()
            self.forward_backward(rows, 11)
            self.forward_backward(rows, 13)
            with self.ledger.phase("update"):
                self.optimizer.clip(1.0)
                self.optimizer.step(1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_steps_on_meta_are_those_on_the_cpu(recompute):
    real, meta = Step("cpu", recompute=recompute), Step("meta", recompute=recompute)
    start = real.ledger.alive_bytes
    for _ in range(2):
        for step in (real, meta):
            step.run()
            assert step.ledger.alive_bytes == start
    seen = [
        [(s.op, s.shape, s.dtype, s.category, s.phase, s.module, change) for s, change in step.ledger.events]
        for step in (real, meta)
    ]
    assert len(seen[0]) > 2000
    assert seen[0] == seen[1]
    assert real.ledger.by_phase() == meta.ledger.by_phase()


def test_after_a_step_weights_gradients_moments():
    """By hand and by walking the garbage collector's objects."""

    def storages() -> dict[int, int]:
        tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    older = storages()
    step = Step("cpu")
    step.run()
    ledger = step.ledger
    names, sizes = zip(*((name, p.numel()) for name, p in step.model.named_parameters()), strict=True)
    weights = sum(sizes)
    buffers = sum(b.nbytes for b in step.model.buffers())
    assert ledger.snapshot().by_category() == {
        WEIGHTS: 2 * weights + buffers,
        GRADIENTS: 4 * weights,
        OPTIMIZER: 12 * weights + 4 * len(names),
    }
    assert ledger.alive_bytes == sum(nbytes for key, nbytes in storages().items() if key not in older)


@pytest.mark.parametrize("recompute", [False, True])
def test_agrees_with_the_allocator(recompute):
    """Every allocation of a forward and backward in float32, by torch's profiler in a step without a ledger.

    Left out: what is smaller than 200 bytes (kernels make such scalars for themselves) and the random state that
    checkpointing saves.
    """
    step = Step("cpu", dtype=torch.float32, recompute=recompute)
    random_state = torch.get_rng_state().nbytes
    with step.ledger:
        step.forward_backward(2, 11)
        step.ledger.restart()
        start = len(step.ledger.events)
        step.forward_backward(2, 11)
    ours = [change for _, change in step.ledger.events[start:]]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.forward_backward(2, 11)
    found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    theirs = [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]
    ours, theirs = ([n for n in list_ if abs(n) >= 200 and abs(n) != random_state] for list_ in (ours, theirs))
    assert len(ours) > 300
    assert ours == theirs
    assert max(accumulate(ours)) == max(accumulate(theirs))


def test_gradients_are_those_without_a_ledger():
    """In-place sums of gradients must leave alone what somebody else holds."""

    def gradients(model: PreTrainedModel) -> list[Tensor]:
        ids = torch.arange(12).view(2, 6)
        kept = []
        embedded = model.get_input_embeddings()(ids)
        embedded.retain_grad()
        embedded.register_hook(kept.append)
        a = embedded * 3
        for node in (a.exp().grad_fn, a.grad_fn):
            node.register_hook(lambda inputs, _: kept.extend(inputs))
        shared = a + (a + a.sin())
        shared.register_hook(kept.append)
        logits = model(inputs_embeds=embedded + 1e-3 * shared).logits
        (logits.log_softmax(-1).gather(-1, ids[..., None]).sum() + shared[0].sum() + a[:, [0, 0, 1]].sum()).backward()
        return [*kept, embedded.grad, *(p.grad for p in model.parameters())]

    plain = gradients(build_model("llama", attn_implementation="eager"))
    with Ledger():
        counted = gradients(build_model("llama", attn_implementation="eager"))
    assert len(plain) > 20
    for one, other in zip(plain, counted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_optimizer_kernels(implementation):
    """Fused AdamW needs nothing beside its state; the others hold whole copies, which are workspace."""
    weight = nn.Parameter(torch.ones(1000))
    ledger = Ledger()
    with ledger:
        optimizer = torch.optim.AdamW(
            [weight], fused=implementation == "fused", foreach=implementation == "foreach", lr=1e-3
        )
        weight.grad = torch.ones(1000)
        optimizer.step()
        ledger.register([("weight", weight)], WEIGHTS)
        ledger.register([("grad", weight.grad)], GRADIENTS)
        ledger.register(optimizer.state[weight].items(), OPTIMIZER)
        assert ledger.snapshot().by_category() == {WEIGHTS: 4000, GRADIENTS: 4000, OPTIMIZER: 8004}
        with ledger.phase("update"):
            optimizer.step()
    update = ledger.by_phase()["update"].by_category()
    assert update.get(WORKSPACE, 0) >= (4000 if implementation != "fused" else 0)
    assert implementation != "fused" or WORKSPACE not in update
    assert ledger.alive_bytes == 16004


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
            x > 0
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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
def test_half_the_batch_after_an_out_of_memory(phase, recompute):
    """Capped one byte under the peak of a phase, the step stops in that phase; then half of it goes through."""
    free = Step("cpu", recompute=recompute)
    free.run(rows=4)
    peaks = {name: peak.alive_bytes for name, peak in free.ledger.by_phase().items()}
    rows = 1 if phase == "update" else 4
    if phase == "update":  # its own need does not depend on the batch: a batch small enough to reach it
        free.ledger.restart()
        free.run(rows=1)
        peaks = {name: peak.alive_bytes for name, peak in free.ledger.by_phase().items()}
    step = Step("cpu", recompute=recompute, cap_bytes=peaks[phase])
    start = step.ledger.alive_bytes
    if peaks[phase] == max(peaks.values()):
        step.run(rows)  # fits exactly
    step.ledger.cap_bytes = peaks[phase] - 1
    with pytest.raises(torch.OutOfMemoryError):
        step.run(rows)
    assert step.ledger.events[-1][0].phase == phase or step.ledger.alive_bytes == start
    assert step.ledger.alive_bytes == start
    step.ledger.cap_bytes = max(peaks.values()) - 1 if phase == "update" else peaks[phase] - 1


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
    assert forward.by_category() == {WEIGHTS: 1600, ACTIVATIONS: 192, LOGITS: 2400, Category.KV_CACHE: 160}
    # Log-softmax and its gradient; then the gradient of the weight instead of log-softmax.
    assert backward.by_category() == {
        WEIGHTS: 1600, GRADIENTS: 1600, ACTIVATIONS: 192 + 4, LOGITS: 1200, Category.KV_CACHE: 160,
    }  # fmt: skip
    assert ledger.snapshot().by_category()[GRADIENTS] == 1600
    del cache


@pytest.mark.parametrize("chunk", [3, None])
def test_logits_of_chunked_logprobs(chunk):
    """In float32 one buffer [chunk, V], and one more for the entropies, forward only."""
    hidden, weight = torch.ones(10, 4, requires_grad=True), torch.ones(37, 4)
    token_ids = torch.arange(10)
    rows = chunk or 10
    with Ledger(vocab_size=37) as ledger:
        with ledger.phase("forward"):
            logprobs, _ = chunked_logprobs(
                hidden, weight, token_ids, temperature=1.0, chunk_tokens=chunk, with_entropy=True
            )
        with ledger.phase("backward"):
            logprobs.sum().backward()
    peaks = {name: peak.by_category()[LOGITS] for name, peak in ledger.by_phase().items() if name != "other"}
    assert peaks == {"forward": 2 * 4 * 37 * rows, "backward": 4 * 37 * rows}


def test_gradients_that_optimizers_take_away_and_expanded_ones():
    """MasterAdamW clears bfloat16 gradients as they come; the gradient of a sum is one number, copied by autograd."""
    tied = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    MasterAdamW([("tied", tied)], OptimConfig(), master=True)
    plain = nn.Parameter(torch.ones(8))
    with Ledger() as ledger:
        ledger.register_gradients([("tied", tied), ("plain", plain), ("frozen", torch.ones(8))])
        (tied.exp().sum() + tied.sin().sum()).float().backward()
        plain.sum().backward()
    born = [s for s, change in ledger.events if change > 0 and s.category is GRADIENTS]
    assert [(s.module, s.nbytes) for s in born] == [("tied", 16), ("plain", 32)]
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

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.broken = nn.Linear(4, 6), nn.Tanh(), Broken()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.up(x)) * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
                x = y[:, :4].exp()
            return x

    net = Net()
    with Ledger() as ledger:
        ledger.watch(net, prefix="net")
        with pytest.raises(ZeroDivisionError):
            net.blocks[0].broken(torch.ones(2, 4))
        ledger.restart()
        with ledger.phase("forward"):
            loss = net(torch.ones(2, 4)).sqrt().sum()
        with ledger.phase("backward"):
            loss.backward()
    born = [(s.phase, s.op, s.module) for s, change in ledger.events if change > 0]
    for i in (0, 1):
        for phase in ("forward", "backward") if recompute else ("forward",):
            assert (phase, "aten.addmm", f"net.blocks.{i}.up") in born
            assert (phase, "aten.tanh", f"net.blocks.{i}.gate") in born
            assert born.count((phase, "aten.mul", f"net.blocks.{i}")) <= 2
        assert ("backward", "aten.mm", f"net.blocks.{i}.up") in born
        assert ("backward", "aten.tanh_backward", f"net.blocks.{i}.gate") in born
        assert ("backward", "aten.mul", f"net.blocks.{i}") in born
    assert ("backward", "aten.slice_backward", "net") in born
    assert ("forward", "aten.sqrt", "") in born
    assert ("backward", "aten.div", "") in born
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    groups = [str(group) for group in ledger.by_phase()["forward"].groups]
    assert recompute or "2 x [2, 6] float32 activations at net.blocks.*.gate" in groups


def test_snapshot_is_plain_data():
    step = Step("cpu")
    step.run()
    peak = step.ledger.peak()
    assert json.loads(json.dumps(asdict(peak)))["groups"][0]["category"] in list(Category)
    assert sum(group.nbytes for group in peak.groups) == peak.alive_bytes == max(step.ledger.timeline())
    assert sum(peak.by_category().values()) == peak.alive_bytes
    assert peak.alive_bytes == max(found.alive_bytes for found in step.ledger.by_phase().values())
    assert [group.nbytes for group in peak.groups] == sorted((group.nbytes for group in peak.groups), reverse=True)


# Elsewhere


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_decoding_with_a_growing_cache(mode):
    model = build_model("llama", attn_implementation="eager")
    with Ledger() as ledger, mode():
        past = None
        for length in range(1, 4):
            out = model(torch.ones(3, 1, dtype=torch.int64), past_key_values=past, use_cache=True)
            past = out.past_key_values
            kv = [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]
            ledger.register((("kv", tensor) for tensor in kv), "KV cache")
            # 2 layers, keys and values, 3 rows, 2 heads, 8 numbers
            assert ledger.snapshot().by_category()[Category.KV_CACHE] == 2 * 2 * 3 * 2 * 8 * 4 * length
            del out, kv
        del past, tensor
        assert ledger.alive_bytes == 0


def test_item_on_meta():
    x = torch.empty(3, device="meta")
    with Ledger() as ledger:
        assert x.sum().item() == 1.0
        assert bool((x > 0).any()) is True
    with Ledger(meta_item=7.0):
        count = (x > 0).sum().item()
        assert count == 7 and isinstance(count, int)
        assert torch.tensor(2.5).item() == 2.5
    assert ledger.alive_bytes == 0


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
