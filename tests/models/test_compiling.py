"""Compiled layers: the same gradients, in training only, and what is said where there is no compiler."""

from __future__ import annotations

import copy

import pytest
import torch
from families import family, random_prompt, random_rollout
from torch import Tensor
from transformers import PreTrainedModel

from grpofit.algo.packing import Packing
from grpofit.data.batching import make_micro_batches
from grpofit.models.attention import reading_packed_rows
from grpofit.models.compiling import CompiledLayers, compiler_missing
from grpofit.models.head import find_head, token_logprobs
from grpofit.types import FinishReason

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own inside


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "g++" in str(compiler_missing(CPU))


def test_rollouts_run_the_layers_as_they_are() -> None:
    model = family("llama")
    layers = CompiledLayers(model)
    plain = model.model.layers[0].forward
    with pytest.raises(RuntimeError, match="on purpose"), layers.switched_on():
        assert model.model.layers[0].forward != plain
        raise RuntimeError("on purpose")
    assert model.model.layers[0].forward == plain and "forward" not in vars(model.model.layers[0])


def gradient(model: PreTrainedModel, lengths: list[int]) -> Tensor:
    rollouts = [random_rollout(random_prompt(0, 6), 0, i, n, FinishReason.STOP) for i, n in enumerate(lengths)]
    (batch,) = make_micro_batches(
        rollouts, packed=True, budget_tokens=None, pad_token_id=0, mask_truncated=False, device=CPU
    )
    assert batch.packing is not None
    head = find_head(model)
    with reading_packed_rows(model):
        logprobs, _ = token_logprobs(
            model, head, batch.input_ids, batch.position_ids, batch.predict_index, batch.target_ids,
            packing=Packing(batch.packing, CPU), temperature=1.0, chunk_tokens=None, with_entropy=False,
        )  # fmt: skip
        (logprobs * torch.cos(torch.arange(len(logprobs)))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.skipif(compiler_missing(CPU) is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["llama tied", "qwen3", "gemma2"])
def test_compiled_gradients_differ_by_rounding(name: str) -> None:
    """Twice, with other lengths, so that the graph for any number of tokens is the one compared."""
    plain, compiled = family(name), family(name)
    layers = CompiledLayers(compiled)
    for lengths in ([5, 3, 4], [9, 2, 6]):
        expected = gradient(copy.deepcopy(plain), lengths)
        compiled.zero_grad()
        with layers.switched_on():
            got = gradient(compiled, lengths)
        assert (got - expected).norm() / expected.norm() < 1e-5
