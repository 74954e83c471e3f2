"""Recomputation: every mode and tile gives the plain gradient and keeps less; rollouts are left alone."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from families import FAMILIES, build_model, family, policy_of, random_prompt
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpofit.algo.packing import Packing
from grpofit.errors import ModelError
from grpofit.memory.ledger import Ledger
from grpofit.models.attention import reading_packed_rows
from grpofit.models.head import hidden_states
from grpofit.models.recompute import HostCopies, _recompute_blocks, apply_recompute
from grpofit.rollout.transformers import TransformersEngine
from grpofit.types import PackedGroup, RolloutKey, Sampling

MODES = ["none", "selective", "full", "offload", "host copies"]
TILES = [None, 7, 33, 50]  # of 33 tokens: pieces that do not divide, exactly one, one with room
LENGTH = 11


def for_training(name: str) -> PreTrainedModel:
    """Without dropout, as policies are loaded."""
    model = family(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def recomputing(model: PreTrainedModel, mode: str, tile: int | None) -> list[str]:
    """As `apply_recompute`; 'host copies' is what offload does on a card, here without streams."""
    if mode != "host copies":
        return apply_recompute(model, mode, tile)  # type: ignore[arg-type]
    _recompute_blocks(model, HostCopies(model.device).checkpoint)
    return apply_recompute(model, "none", tile)


def batch(rows: int = 3, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(3))
    return ids, torch.arange(length)[None].expand(rows, length)


def backward(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """A scalar in which every hidden state counts differently, after its backward."""
    hidden = hidden_states(model, ids, positions)
    loss = (hidden * torch.sin(torch.arange(hidden.numel()).view(hidden.shape))).sum()
    loss.backward()
    return loss.detach()


def gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@cache
def plain(name: str) -> tuple[Tensor, Tensor]:
    model = for_training(name)
    loss = backward(model, *batch())
    return loss, gradient(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_the_plain_ones(name: str, mode: str) -> None:
    loss, expected = plain(name)
    for tile in TILES:
        model = for_training(name)
        notes = recomputing(model, mode, tile)
        assert notes == (["memory.checkpointing: on the CPU, offload does what full does"] if mode == "offload" else [])
        torch.testing.assert_close(backward(model, *batch()), loss, rtol=1e-5, atol=1e-5)
        got = gradient(model)
        assert got.shape == expected.shape
        assert (got - expected).norm() < 1e-5 * expected.norm(), (tile, float((got - expected).norm()))


# What is kept


def kept_and_peak(model: PreTrainedModel, rows: int, length: int) -> tuple[int, int]:
    """Bytes alive after forward beyond its output, and at most during forward and backward."""
    ids, positions = batch(rows, length)
    with Ledger() as ledger:
        hidden = hidden_states(model, ids, positions)
        kept = ledger.alive_bytes - hidden.nbytes
        hidden.sum().backward()
    model.zero_grad()
    return kept, ledger.peak().alive_bytes


@pytest.mark.parametrize(
    ("name", "mode", "tile", "kept_frac", "peak_frac"),
    [
        ("llama", "selective", None, 0.55, 0.6),
        ("gemma3", "selective", None, 0.55, 0.6),
        ("gemma2", "selective", None, 0.3, 0.6),  # its eager attention keeps the scores, row length squared
        ("phi", "selective", None, 0.55, 0.7),
        ("llama", "full", None, 0.12, 0.4),
        ("llama", "host copies", None, 0.12, 0.4),
        ("gemma2", "full", None, 0.1, 0.6),
        ("llama", "none", 100, 0.75, 0.8),
        ("gpt2", "none", 100, 0.5, 0.6),
    ],
)
def test_memory_falls(name: str, mode: str, tile: int | None, kept_frac: float, peak_frac: float) -> None:
    # Many tokens and four layers, so that activations are most of it.
    model_type, options = FAMILIES[name]
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2} if "layer_types" in options else {}
    depth = {"n_layer": 4, "n_positions": 512} if model_type == "gpt2" else {"num_hidden_layers": 4}
    model = build_model(model_type, **{**options, **layers, **depth}).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    before = kept_and_peak(model, 20, 50)
    recomputing(model, mode, tile)
    after = kept_and_peak(model, 20, 50)
    assert after[0] <= kept_frac * before[0], f"kept {after[0] / before[0]:.2f}"
    assert after[1] <= peak_frac * before[1], f"peak {after[1] / before[1]:.2f}"


def test_a_tile_bounds_a_block_recomputed() -> None:
    # With whole blocks recomputed, the MLP of one block is what is large in backward.
    peaks = {}
    for tile in (None, 100):
        model = build_model("llama", intermediate_size=640, num_hidden_layers=3).train()
        recomputing(model, "full", tile)
        peaks[tile] = kept_and_peak(model, 20, 50)[1]
    assert peaks[100] < 0.5 * peaks[None]


def test_blocks_stop_recomputing_before_a_tiled_mlp() -> None:
    # Its output is needed by nobody in backward: each tile is computed in forward and for its gradient, not thrice.
    calls = {}
    for mode in ("none", "full"):
        model = for_training("llama")
        recomputing(model, mode, 7)
        seen: list[int] = []
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        backward(model, *batch())
        calls[mode] = len(seen)
    assert calls == {"none": 10, "full": 10}  # 33 tokens are 5 tiles


# Block inputs in host memory


def test_only_block_inputs_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[torch.Size] = []
    original = HostCopies._pack

    def watched(self: HostCopies, tensor: Tensor) -> Any:
        copy = original(self, tensor)
        if copy is not tensor:
            packed.append(tensor.shape)
        return copy

    monkeypatch.setattr(HostCopies, "_pack", watched)
    for name in ("gemma2", "gpt2"):  # gpt2 passes its mask by position, the others by keyword
        packed.clear()
        model = for_training(name)
        recomputing(model, "host copies", None)
        backward(model, *batch())
        assert packed == [(3, LENGTH, 32)] * 2, name


def test_host_copies_come_back_one_block_ahead() -> None:
    model = build_model("llama", num_hidden_layers=4).train()
    copies = HostCopies(model.device)
    _recompute_blocks(model, copies.checkpoint)
    fetched: list[list[bool]] = []

    def look(*_: object) -> None:
        fetched.append([ref().fetched is not None for ref in copies._held])

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(look)
    backward(model, *batch())
    # Four times in forward, four times when a block is recomputed and the inputs of those before it are still held.
    assert fetched == [
        *([False] * held for held in (1, 2, 3, 4)),
        *([*[False] * (held - 1), True] for held in (3, 2, 1)),
        [],
    ]


def test_a_forward_without_backward_leaves_nothing_behind() -> None:
    model = for_training("llama")
    copies = HostCopies(model.device)
    _recompute_blocks(model, copies.checkpoint)
    hidden_states(model, *batch())  # dropped
    backward(model, *batch())
    assert copies._held == []
    expected = plain("llama")[1]
    assert (gradient(model) - expected).norm() < 1e-5 * expected.norm()


# Tiles


def test_gradients_of_tiles_add_up_in_float32() -> None:
    model = build_model("llama").to(torch.bfloat16).train()
    mlp = model.model.layers[0].mlp
    hidden = torch.randn(1, 4096, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

    def error(rounded: nn.Module) -> float:
        rounded(hidden).sum().backward()
        got = rounded.down_proj.weight.grad
        return float((got - exact).norm() / exact.norm())

    wide = copy.deepcopy(mlp).float()
    wide(hidden.float()).sum().backward()
    exact = wide.down_proj.weight.grad
    whole = error(copy.deepcopy(mlp))
    apply_recompute(model, "none", 16)
    # Added up in bfloat16, 256 tiles would be off several times as much.
    assert error(mlp) < 1.2 * whole


def test_hooks_of_weights_run_once() -> None:
    model = for_training("llama")
    apply_recompute(model, "none", 7)
    weight = model.model.layers[1].mlp.up_proj.weight
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    backward(model, *batch())
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)


@pytest.mark.parametrize("mode", ["none", "selective", "full", "host copies"])
def test_frozen_weights(mode: str) -> None:
    # As under an adapter: the first block's input has no gradient, most weights have none.
    grads = []
    for recompute in (False, True):
        model = for_training("qwen2").requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.requires_grad_(True)
            layer.self_attn.q_proj.bias.requires_grad_(True)
        if recompute:
            recomputing(model, mode, 7)
        backward(model, *batch())
        grads.append(gradient(model))
    assert len(grads[0]) == 2 * (48 * 32 + 32)
    assert (grads[1] - grads[0]).norm() < 1e-5 * grads[0].norm()


class _Cumulated(nn.Module):
    """Looks like an MLP, and its tokens see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(hidden.cumsum(1))


class _WithResidual(_Cumulated):
    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return residual + self.down_proj(hidden)


@pytest.mark.parametrize("kind", [_Cumulated, _WithResidual])
def test_what_is_not_a_function_of_each_token_is_not_tiled(kind: type[nn.Module]) -> None:
    model = for_training("llama")
    model.model.layers[0].mlp = kind()
    notes = apply_recompute(model, "none", 7)
    assert len(notes) == 1 and kind.__name__ in notes[0] and "memory.mlp_tile_tokens" in notes[0]
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert "forward" in vars(model.model.layers[1].mlp)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_experts_are_left_whole(mode: str) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model, other = (build_model("mixtral", **experts).train() for _ in range(2))
    [note] = apply_recompute(model, mode, 7)
    assert "MixtralSparseMoeBlock" in note
    backward(model, *batch())
    backward(other, *batch())
    assert (gradient(model) - gradient(other)).norm() < 1e-5 * gradient(other).norm()


def test_blocks_without_an_mlp_of_their_own() -> None:
    model = build_model("opt", ffn_dim=48, word_embed_proj_dim=32).train()
    assert apply_recompute(model, "none", 7) == [
        "memory.mlp_tile_tokens has no effect: this architecture's blocks have no MLP of their own"
    ]


# Who is left alone, and what passes through


@pytest.mark.parametrize("mode", ["selective", "full", "host copies"])
def test_packed_rows_pass_through(mode: str) -> None:
    groups = [PackedGroup(0, 5, (4, 1)), PackedGroup(10, 3, (6,))]
    positions = torch.tensor([[*range(5), *range(5, 9), 5, *range(3), *range(3, 9)]])
    ids = batch(1, 19)[0]
    grads = []
    for recompute in (False, True):
        model = for_training("gemma2")
        if recompute:
            recomputing(model, mode, 7)
        with reading_packed_rows(model):
            out = model.base_model(
                input_ids=ids, position_ids=positions, use_cache=False, packing=Packing(groups, model.device)
            )
            (out.last_hidden_state * torch.arange(19.0)[:, None].cos()).sum().backward()
        grads.append(gradient(model))
    assert (grads[1] - grads[0]).norm() < 1e-5 * grads[0].norm()


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_rollouts_are_left_alone(mode: str) -> None:
    sampled = []
    for recompute in (False, True):
        model = for_training("llama")
        if recompute:
            apply_recompute(model, mode, 7)  # type: ignore[arg-type]
        engine = TransformersEngine(policy_of(model), None)
        model.train()
        prompts = [random_prompt(i, 3 + i) for i in range(3)]
        keys = [RolloutKey(1, 0, i, 0) for i in range(3)]
        sampled.append(engine.generate(prompts, keys, Sampling(9)))
        assert model.training
        model.eval()
        with torch.no_grad():
            cache = model(input_ids=batch()[0], use_cache=True).past_key_values
        assert cache.get_seq_length() == LENGTH
    assert sampled[1] == sampled[0]
    assert kept_and_peak(model, 3, LENGTH) == kept_and_peak(for_training("llama").eval(), 3, LENGTH)


def test_a_copy_uses_its_own_weights() -> None:
    model = for_training("qwen3")
    names = list(model.state_dict())
    apply_recompute(model, "selective", 7)
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == list(twin.state_dict()) == names
    with torch.no_grad():
        for layer in twin.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.q_norm.weight.zero_()
    assert (hidden_states(twin, *batch()) - hidden_states(model, *batch())).norm() > 1
    backward(twin, *batch())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_on_meta(mode: str) -> None:
    with torch.device("meta"), Ledger():  # which answers `item()`, transformers asks one of the positions
        model = build_model("llama").train()
        assert apply_recompute(model, mode, 7) == []  # type: ignore[arg-type]
        hidden = hidden_states(
            model, torch.zeros(3, LENGTH, dtype=torch.long), torch.zeros(3, LENGTH, dtype=torch.long)
        )
        hidden.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.base_model.parameters())


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_an_architecture_without_blocks_is_refused(mode: str) -> None:
    with pytest.raises(ModelError) as caught:
        apply_recompute(build_model("llama", num_hidden_layers=0), mode, None)  # type: ignore[arg-type]
    assert "--set memory.checkpointing=none" in caught.value.fix and mode in caught.value.what
