"""Checkpoints as files: converted without building the model they hold."""

from __future__ import annotations

from .convert import Conversion, convert_checkpoint

__all__ = ["Conversion", "convert_checkpoint"]
