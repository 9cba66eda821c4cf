"""The command line, `hf-posenc` or `python -m hf_posenc`. Importing the command modules registers their commands."""

from . import autoload, checkpoints, eval, plot, train
from .app import app

__all__ = ["app", "autoload", "checkpoints", "eval", "plot", "train"]
