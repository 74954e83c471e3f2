"""The ledger over whole training steps: on meta as on the CPU, against torch's own allocator, as a small card."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB_SIZE, build_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from grpofit.algo.logprobs import chunked_logprobs
from grpofit.config import OptimConfig
from grpofit.memory.ledger import Category, Ledger
from grpofit.models.head import Head, token_logprobs
from grpofit.training.optim import MasterAdamW

WEIGHTS, GRADIENTS, OPTIMIZER, WORKSPACE = Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER, Category.WORKSPACE


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Deaths must be noticed without it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


class Step:
    """A tiny Llama and its optimizer, registered; `run` is one step of two micro batches of unequal length."""

    def __init__(self, device: str, *, dtype: torch.dtype = torch.bfloat16, recompute: bool = False, **options: Any):
        self.model = build_model("llama", attn_implementation="eager", tie_word_embeddings=True).to(dtype).to(device)
        self.model.tie_weights()  # which a move to meta has undone
        if recompute:
            self.model.train()
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.device = device
        self.ledger = Ledger(vocab_size=VOCAB_SIZE, **options)
        self.head = Head(self.model.get_output_embeddings())
        with self.ledger:
            self.ledger.register([*self.model.named_parameters(), *self.model.named_buffers()], WEIGHTS)
            with self.ledger.category(OPTIMIZER):
                config = OptimConfig(implementation="loop")
                self.optimizer = MasterAdamW(self.model.named_parameters(), config, master=dtype != torch.float32)

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


def test_after_a_step_weights_and_optimizer_state():
    """By hand, and by walking the garbage collector's objects."""

    def storages() -> dict[int, int]:
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    older = storages()
    step = Step("cpu")
    step.run()
    weights = sum(p.numel() for p in step.model.parameters())
    buffers = sum(b.nbytes for b in step.model.buffers())
    # Weights and the lower half of their masters in 16 bits, two moments in 32.
    assert step.ledger.snapshot().by_category() == {WEIGHTS: 2 * weights + buffers, OPTIMIZER: (2 + 8) * weights}
    assert step.ledger.alive_bytes == sum(nbytes for key, nbytes in storages().items() if key not in older)


def allocations(run: Callable[[], None]) -> tuple[list[int], list[int]]:
    """Bytes of every allocation and (negative) release in `run`: by the ledger, and by torch's profiler without one.

    Left out: what is smaller than 300 bytes (kernels make scalars and positions for themselves) and the random state
    that checkpointing saves.
    """
    with Ledger() as ledger:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    theirs = [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]
    random_state = torch.get_rng_state().nbytes
    ours, theirs = (
        [n for n in list_ if abs(n) >= 300 and abs(n) != random_state]
        for list_ in ([change for _, change in ledger.events], theirs)
    )
    return ours, theirs


@pytest.mark.parametrize("recompute", [False, True])
def test_agrees_with_the_allocator(recompute):
    """Allocation by allocation, forward and backward in float32 (whose kernels here need no memory of their own)."""
    step = Step("cpu", dtype=torch.float32, recompute=recompute)

    def run() -> None:
        step.forward_backward(2, 11)
        step.optimizer.zero_grad()

    ours, theirs = allocations(run)
    assert len(ours) > 300
    assert ours == theirs


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi", "gpt2"])
def test_agrees_with_the_allocator_in_other_architectures(name):
    """With biases, other activations, other norms; from the whole logits, whose gradient autograd scatters."""
    model_type, options = FAMILIES[name]
    model = build_model(model_type, **{**options, "attn_implementation": "eager"})
    ids = torch.arange(26).view(2, 13)

    def run() -> None:
        model(input_ids=ids, use_cache=False).logits.log_softmax(-1).gather(-1, ids[..., None]).sum().backward()
        model.zero_grad()

    ours, theirs = allocations(run)
    assert len(ours) > 200
    assert ours == theirs


def test_gradients_are_those_without_a_ledger():
    """In-place sums of gradients must leave alone what somebody else holds."""

    def gradients(model: PreTrainedModel) -> list[Tensor]:
        ids = torch.arange(12).view(2, 6)
        kept = []
        embedded = model.get_input_embeddings()(ids)
        embedded.retain_grad()
        embedded.register_hook(kept.append)
        a, b, c = embedded * 3, embedded * 2, embedded * 5
        parts = [b.exp(), b.sin(), b.cos()]
        for part in parts:  # what each adds to the gradient of b
            part.grad_fn.register_hook(lambda inputs, _: kept.extend(inputs))
        shared = a + (a + sum(parts))
        shared.register_hook(kept.append)
        logits = model(inputs_embeds=embedded + 1e-3 * shared).logits
        loss = logits.log_softmax(-1).gather(-1, ids[..., None]).sum() + shared[0].sum() + a[:, [0, 0, 1]].sum()
        # The last sum comes first in backward: what is added to is one number, expanded.
        (loss + c.exp().sum() + 2 * c.sum()).backward()
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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_part_of_the_batch_after_an_out_of_memory(recompute, device):
    """A step that needs all of the card; with one byte less it stops, and a third of its rows still goes through."""
    step = Step(device, recompute=recompute)
    start = step.ledger.alive_bytes
    step.run(rows=12)
    peak = step.ledger.peak()
    assert peak.phase == "backward"
    step.ledger.cap_bytes = peak.alive_bytes
    step.run(rows=12)
    step.ledger.cap_bytes -= 1
    with pytest.raises(torch.OutOfMemoryError):
        step.run(rows=12)
    step.optimizer.zero_grad()
    assert step.ledger.alive_bytes == start
    step.run(rows=4)
    assert step.ledger.alive_bytes == start
    assert step.ledger.peak() == peak


def test_snapshot_is_plain_data():
    step = Step("cpu")
    step.run()
    peak = step.ledger.peak()
    assert json.loads(json.dumps(asdict(peak)))["groups"][0]["category"] in list(Category)
    assert sum(group.nbytes for group in peak.groups) == peak.alive_bytes == max(step.ledger.timeline())
    assert sum(peak.by_category().values()) == peak.alive_bytes
    assert peak.alive_bytes == max(found.alive_bytes for found in step.ledger.by_phase().values())
    assert [group.nbytes for group in peak.groups] == sorted((group.nbytes for group in peak.groups), reverse=True)


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
    peaks = {name: peak.by_category()[Category.LOGITS] for name, peak in ledger.by_phase().items() if name != "other"}
    assert peaks == {"forward": 2 * 4 * 37 * rows, "backward": 4 * 37 * rows}


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
        del past
        assert ledger.alive_bytes == 0
