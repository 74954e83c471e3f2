"""GGUF files: unpacked once into a Hugging Face folder in the user's cache, then loaded like any other model.

Owns the conversion and its cache (`$XDG_CACHE_HOME/grpofit/gguf`). Reading a GGUF vocabulary takes the better part of
a minute on a slow machine; the folder loads in seconds and, unlike the GGUF model, can be saved. Must not know which
dtype is wanted: the folder holds float32, the exact dequantised values.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def unpacked_folder(gguf_path: Path) -> Path:
    """The Hugging Face folder with the content of `gguf_path`, made if it is not in the cache yet."""
    stat = gguf_path.stat()
    identity = f"{gguf_path.resolve()} {stat.st_size} {stat.st_mtime_ns} {version('transformers')} {version('gguf')}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = _cache_root() / f"{gguf_path.stem}-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may convert at once: each writes beside, the first rename wins.
        beside = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            _convert(gguf_path, beside)
            os.rename(beside, folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpofit" / "gguf"


def _convert(gguf_path: Path, folder: Path) -> None:
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _restore_bos(tokenizer, gguf_path)
    tokenizer.save_pretrained(folder)
    # Newer versions keep GGUF weights packed unless told otherwise; packed weights cannot be trained.
    if hasattr(transformers, "GgufConfig"):
        where["quantization_config"] = transformers.GgufConfig(dequantize=True)
    _plain(AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)).save_pretrained(folder)


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under a config that does not claim to be quantised, which could not be saved."""
    clean = copy.deepcopy(model.config)
    if hasattr(clean, "quantization_config"):
        del clean.quantization_config
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(clean)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _restore_bos(tokenizer: PreTrainedTokenizerBase, gguf_path: Path) -> None:
    """Make the tokenizer add BOS where the GGUF file asks for it and the conversion lost it."""
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing

    field = GGUFReader(gguf_path).fields.get("tokenizer.ggml.add_bos_token")
    wants_bos = field is not None and bool(field.contents())
    if not wants_bos or tokenizer.bos_token_id is None or tokenizer("a").input_ids[0] == tokenizer.bos_token_id:
        return
    backend: Any = tokenizer
    backend.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(str(tokenizer.bos_token), tokenizer.bos_token_id)]
    )
