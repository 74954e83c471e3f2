"""Saving a policy in the Hugging Face format, so that others load it.

Owns the layout of an exported model folder. Must not know about checkpoints (`training/checkpoint.py`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpofit.models.load import Policy


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights (safetensors), config and tokenizer to `folder`, all or nothing: written beside, then renamed."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    _allow_sampling_settings(policy)
    policy.model.save_pretrained(beside)
    policy.tokenizer.save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def _allow_sampling_settings(policy: Policy) -> None:
    """Models are published with a temperature and `do_sample: false`, which transformers loads and will not save."""
    generation = policy.model.generation_config
    if generation is None or generation.do_sample:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
