"""The command `hf-posenc`. `python -m hf_posenc` is the same. One file for each command."""

from . import convert, eval, inspect, plot, push, schemes, train
from .app import app

__all__ = ["app", "convert", "eval", "inspect", "plot", "push", "schemes", "train"]
