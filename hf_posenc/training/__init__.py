"""Recover a model's quality after its position encoding has changed: warm start, distillation, training runs."""

from .argument_checks import check_hub_arguments, check_numbers
from .arguments import TrainRequest, parse_train_length, rows_per_step
from .budget import budget_arguments, default_learning_rate
from .closed_form import closed_form_start
from .data import generate_text
from .distillation import LossWeights, TeacherOutput, record_hidden_states, transformer_layers
from .factories import load_config
from .objectives import infer_objective
from .optimizer import parameter_groups, train_positions_only
from .position_collators import (
    DataCollatorWithPoSE,
    DataCollatorWithPositions,
    DataCollatorWithRandomizedPositions,
    DataCollatorWithSHAPE,
    PositionEpochCallback,
)
from .recipes import RECIPES, Recipe, get_recipe, resolve_fit_ratio
from .report import format_recovery
from .run import train
from .stock_start import ClosedFormStart
from .teacher import Teacher
from .teacher_cache import TeacherCache
from .trainer import RecoveryTrainer
from .warm_start import FitResult, absorb_table_mean, fit

__all__ = ["RECIPES", "Recipe", "TrainRequest", "budget_arguments", "default_learning_rate", "load_config", "train"]
__all__ += ["LossWeights", "RecoveryTrainer", "Teacher", "TeacherCache", "TeacherOutput", "record_hidden_states"]
__all__ += ["ClosedFormStart", "FitResult", "absorb_table_mean", "closed_form_start", "fit", "format_recovery"]
__all__ += ["check_hub_arguments", "check_numbers", "generate_text", "infer_objective", "parameter_groups"]
__all__ += ["parse_train_length", "resolve_fit_ratio", "rows_per_step", "train_positions_only", "transformer_layers"]
__all__ += ["DataCollatorWithPoSE", "DataCollatorWithPositions", "DataCollatorWithRandomizedPositions"]
__all__ += ["DataCollatorWithSHAPE", "PositionEpochCallback", "get_recipe"]
