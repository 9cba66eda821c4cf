"""Recover a model's quality after its position encoding has changed: warm start, distillation, training runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arguments import RECIPES as RECIPES
    from .arguments import Recipe as Recipe
    from .arguments import TrainRequest as TrainRequest
    from .arguments import default_learning_rate as default_learning_rate
    from .arguments import resolve_fit_ratio as resolve_fit_ratio
    from .data import generate_text as generate_text
    from .distillation import LossWeights as LossWeights
    from .distillation import Teacher as Teacher
    from .distillation import TeacherOutput as TeacherOutput
    from .distillation import record_hidden_states as record_hidden_states
    from .distillation import transformer_layers as transformer_layers
    from .factories import load_config as load_config
    from .optimizer import parameter_groups as parameter_groups
    from .optimizer import train_positions_only as train_positions_only
    from .run import train as train
    from .trainer import RecoveryTrainer as RecoveryTrainer
    from .warm_start import FitResult as FitResult
    from .warm_start import absorb_table_mean as absorb_table_mean
    from .warm_start import fit as fit

# Resolved on first use: torch and transformers are slow to import, accelerate and datasets are optional.
_EXPORTS = {
    "arguments": ("RECIPES", "Recipe", "TrainRequest", "default_learning_rate", "resolve_fit_ratio"),
    "data": ("generate_text",),
    "distillation": ("LossWeights", "Teacher", "TeacherOutput", "record_hidden_states", "transformer_layers"),
    "factories": ("load_config",),
    "optimizer": ("parameter_groups", "train_positions_only"),
    "run": ("train",),
    "trainer": ("RecoveryTrainer",),
    "warm_start": ("FitResult", "absorb_table_mean", "fit"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
