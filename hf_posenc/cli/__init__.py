"""The command `hf-posenc`. `python -m hf_posenc` is the same. One file for each command."""

from . import convert, inspect, push, schemes, train
from .app import app

__all__ = ["app", "convert", "inspect", "push", "schemes", "train"]
