"""Position schemes, and the API for writing new ones."""

from .base import Kind, LayerParameters, LayerParams, ModelShape, ParameterModule, Scheme
from .inputs import Content, LayerSeams, Positions, is_tracing, repeat_key_heads
from .mixing import InputScheme, MixOptions
from .options import Options, describe_type, option
from .terms import DistanceBias, DistanceTable, KeyTerm, QueryTerm, Remap, RunningSum, Separable, Term

__all__ = ["Content", "InputScheme", "Kind", "LayerParameters", "LayerParams", "MixOptions"]
__all__ += ["ModelShape", "Options", "ParameterModule", "Positions", "Scheme", "option"]
__all__ += ["DistanceBias", "DistanceTable", "KeyTerm", "QueryTerm", "Remap", "RunningSum", "Separable", "Term"]
# For other packages of hf_posenc:
__all__ += ["LayerSeams", "describe_type", "is_tracing", "repeat_key_heads"]
