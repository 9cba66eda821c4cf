"""Recover a model's quality after its position encoding has changed: warm start, distillation, training runs."""

from .arguments import RECIPES, Recipe, TrainRequest, default_learning_rate, resolve_fit_ratio
from .data import generate_text
from .distillation import LossWeights, Teacher, TeacherOutput, record_hidden_states, transformer_layers
from .factories import load_config
from .optimizer import parameter_groups, train_positions_only
from .run import train
from .teacher_cache import TeacherCache
from .trainer import RecoveryTrainer
from .warm_start import FitResult, absorb_table_mean, fit

__all__ = ["RECIPES", "Recipe", "TrainRequest", "default_learning_rate", "load_config", "resolve_fit_ratio", "train"]
__all__ += [
    "LossWeights",
    "RecoveryTrainer",
    "Teacher",
    "TeacherCache",
    "TeacherOutput",
    "record_hidden_states",
    "transformer_layers",
]
__all__ += ["FitResult", "absorb_table_mean", "fit", "generate_text", "parameter_groups", "train_positions_only"]
