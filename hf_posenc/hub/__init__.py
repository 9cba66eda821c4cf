"""Variants on the Hub: uploads and model cards."""

from __future__ import annotations

from .push import PushResult, push_directory, upload_saved_model

__all__ = ["PushResult", "push_directory", "upload_saved_model"]
