"""The configuration layer: what a user may write, what it means, and where each value came from.

Owns the tree, recipes, overrides, origins and the rules across keys. Must not import torch, transformers, or any other
part of the product: the command line and every reader of a run directory load it.
"""

from grpofit.config.catalog import RecipeInfo, recipe_text, recipes
from grpofit.config.resolve import Resolved, load
from grpofit.config.rules import (
    check_model_limits,
    keys_that_cut_layers,
    resolved_clips,
    resolved_ratio,
    resume_conflicts,
)
from grpofit.config.tree import (
    AlgoConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TaskConfig,
)

__all__ = [
    "AlgoConfig",
    "Config",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "RecipeInfo",
    "Resolved",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TaskConfig",
    "check_model_limits",
    "keys_that_cut_layers",
    "load",
    "recipe_text",
    "recipes",
    "resolved_clips",
    "resolved_ratio",
    "resume_conflicts",
]
