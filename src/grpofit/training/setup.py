"""From a configuration to the parts of a step: device, policy, prompts, rewards, engine, optimizer.

Owns what is built, in which order, and the checks that need more than one of them. Must not run a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from grpofit.algo.losses import LossSpec
from grpofit.config import (
    Config,
    Resolved,
    check_model_limits,
    keys_that_cut_layers,
    resolved_clips,
    resolved_ratio,
)
from grpofit.data.prompts import PromptSet, build_prompts
from grpofit.data.tasks import load_task
from grpofit.data.verify import RewardRunner
from grpofit.errors import ConfigError
from grpofit.memory.settings import resolve_memory
from grpofit.models.compiling import PAYS_FROM_STEP_TOKENS, CompiledLayers, compiler_missing
from grpofit.models.load import Policy, load_policy, load_reference
from grpofit.models.recompute import apply_recompute
from grpofit.rollout.transformers import TransformersEngine
from grpofit.training.clock import Clock
from grpofit.training.optim import MasterAdamW
from grpofit.training.step import StepParts, StepSettings
from grpofit.types import Prompt, Sampling


@dataclass(slots=True)
class Evaluator:
    """What an evaluation needs: no optimizer, no training prompts."""

    policy: Policy
    engine: TransformersEngine
    rewards: RewardRunner
    heldout: list[Prompt]
    sampling: Sampling
    notes: list[str]


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where torch sees one.

    Raises:
        ConfigError: a GPU is asked for and torch sees none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"run.device is '{name}', and torch sees no GPU",
            values=f"torch {torch.__version__}" + (", a CPU build" if torch.version.cuda is None else ""),
            why="nothing could run there",
            fix=f"--set run.device=cpu, or {_cuda_install_line()}" if gpu_is_visible() else "--set run.device=cpu",
        )
    return torch.device(name)


def ask_for_determinism(device: torch.device) -> None:
    """Deterministic kernels on CUDA, which are slower; an operation that has none raises. The CPU always is."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)


def device_line(device: torch.device, threads: int) -> str:
    """The first line of every verb that uses torch: device and torch build."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"device: {properties.name}, {properties.total_memory / 1024**3:.1f} GiB · torch {torch.__version__}"
    return f"device: CPU, {threads} thread{'s' if threads > 1 else ''} · torch {torch.__version__}"


def device_warning(device: torch.device) -> str | None:
    """What is wrong with the torch build, if a GPU is there that it cannot use."""
    if device.type == "cpu" and torch.version.cuda is None and torch.version.hip is None and gpu_is_visible():
        return f"this machine has an NVIDIA GPU, but torch is a CPU build: {_cuda_install_line()}"
    return None


def gpu_is_visible() -> bool:
    """Whether the NVIDIA driver shows a GPU, whatever torch was built for."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount()) > 0
    except pynvml.NVMLError:
        return False


def _cuda_install_line() -> str:
    return f"pip install --force-reinstall torch=={torch.__version__.split('+')[0]} (from PyPI it is the CUDA build)"


def set_threads(count: int | str) -> int:
    """Set torch's CPU threads and return their number; sums round differently with another number."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count != "auto":
        threads = int(count)
    torch.set_num_threads(threads)
    return threads


def step_settings(config: Config, vocab_size: int) -> StepSettings:
    """The plain values of a step."""
    clip_low, clip_high = resolved_clips(config.algo)
    ratio = resolved_ratio(config.algo)
    assert ratio in ("token", "sequence")
    return StepSettings(
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        sampling=sampling_of(config),
        loss=LossSpec(
            loss=config.algo.loss,
            max_completion_tokens=config.rollout.max_completion_tokens,
            ratio=ratio,  # type: ignore[arg-type]
            clip_low=clip_low,
            clip_high=clip_high,
            clip_delta=config.algo.clip_delta,
            sapo_tau_pos=config.algo.sapo_tau_pos,
            sapo_tau_neg=config.algo.sapo_tau_neg,
            beta=config.algo.beta,
            kl=config.algo.kl,
            entropy_bonus=config.algo.entropy_bonus,
        ),
        advantage=config.algo.advantage,
        combine=config.algo.combine,
        iterations_per_batch=config.algo.iterations_per_batch,
        mask_truncated=config.algo.mask_truncated,
        count_all_groups=config.algo.denominator == "all",
        max_grad_norm=config.optim.max_grad_norm,
        memory=resolve_memory(config.memory, vocab_size),
    )


def sampling_of(config: Config) -> Sampling:
    """How completions are drawn in training."""
    rollout = config.rollout
    return Sampling(
        max_completion_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def build_evaluator(
    resolved: Resolved,
    device: torch.device,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    log: Path | None = None,
) -> tuple[Evaluator, list[Prompt]]:
    """Everything but the optimizer; returns the training prompts besides.

    Cheap mistakes first: the task and the rewards are checked before weights are loaded.
    """
    config = resolved.config
    # Loading bars of local files would scribble over the display; downloads keep theirs.
    transformers.utils.logging.disable_progress_bar()
    task = load_task(config.task, resolved.base_dir)
    rewards = RewardRunner(
        config.rewards,
        base_dir=resolved.base_dir,
        max_completion_tokens=config.rollout.max_completion_tokens,
        columns=task.columns,
        max_error_frac=config.run.max_reward_error_frac,
        functions=functions,
        task=config.task,
        log=log,
    )
    try:
        policy = load_policy(config.model, resolved.base_dir, device)
        check_model_limits(config, policy.max_positions)
        limit = config.rollout.max_prompt_tokens
        train = build_prompts(task.train, config.task, policy.tokenizer, limit)
        heldout = build_prompts(task.heldout, config.task, policy.tokenizer, limit)
    except BaseException:
        rewards.close()
        raise
    engine = TransformersEngine(policy, resolve_memory(config.memory, policy.vocab_size).generation_chunk)
    notes = [
        f"model: {policy.count_parameters() / 1e6:,.1f} M parameters, {policy.notes[0]}",
        *policy.notes[1:],
        _task_line(task.name, train, heldout, limit),
        *task.notes,
        *engine.notes,
    ]
    evaluator = Evaluator(policy, engine, rewards, heldout.prompts, sampling_of(config), notes)
    return evaluator, train.prompts


def build_parts(resolved: Resolved, evaluator: Evaluator, prompts: list[Prompt], clock: Clock) -> StepParts:
    """Add to an evaluator what training needs."""
    config = resolved.config
    policy = evaluator.policy
    settings = step_settings(config, policy.vocab_size)
    reference = load_reference(config.model, resolved.base_dir, policy.device) if config.algo.beta > 0 else None
    policy.model.train()
    notes = apply_recompute(policy.model, settings.memory.checkpointing, settings.memory.mlp_tile_tokens)
    compiled, note = _compiled(config, policy)
    optimizer = MasterAdamW(
        policy.model.named_parameters(),
        config.optim,
        master=config.model.master_dtype == "float32",
        seed=config.run.seed,
    )
    return StepParts(
        policy, reference, evaluator.engine, evaluator.rewards, prompts, optimizer, settings, clock, compiled,
        [*notes, *note],
    )  # fmt: skip


def _compiled(config: Config, policy: Policy) -> tuple[CompiledLayers | None, list[str]]:
    """Compiled layers where they are asked for, or `auto` finds that they pay; and a note if anything is to be said."""
    wanted, rollout = config.run.compile, config.rollout
    if wanted == "auto":
        group_tokens = rollout.max_prompt_tokens + rollout.group_size * rollout.max_completion_tokens
        tokens = config.algo.iterations_per_batch * rollout.prompts_per_step * group_tokens
        if policy.device.type != "cpu" or keys_that_cut_layers(config.memory) or tokens < PAYS_FROM_STEP_TOKENS:
            return None, []
    if wanted == "none":
        return None, []
    missing = compiler_missing(policy.device)
    if missing is None:
        return CompiledLayers(policy.model), ["run.compile: layers are compiled in the first step, which takes longer"]
    return None, [f"run.compile: layers are not compiled, steps are slower: {missing}"]


def _task_line(name: str, train: PromptSet, heldout: PromptSet, limit: int) -> str:
    line = (
        f"task: {name}, {len(train.prompts)} prompts to train on, {len(heldout.prompts)} held out, "
        f"longest {max(train.longest_tokens, heldout.longest_tokens)} tokens"
    )
    dropped = train.dropped + heldout.dropped
    return line + (f"; {dropped} over {limit} tokens left out" if dropped else "")
