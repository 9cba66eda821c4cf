"""Dispatch as on a GPU, on the CPU."""

from __future__ import annotations

import pytest

from hf_posenc.attention import dispatch, function
from hf_posenc.attention.dispatch import FLEX_SETTING, AttentionPath, DispatchKey, select_path
from hf_posenc.patches import explanation


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> list[AttentionPath]:
    """Answer the question of the device as for a GPU, for inputs of any size. Returns the paths that layers take."""
    paths: list[AttentionPath] = []

    def recording(key: DispatchKey) -> tuple[AttentionPath, str]:
        path, reason = select_path(key)
        paths.append(path)
        return path, reason

    for module in (dispatch, explanation):
        monkeypatch.setattr(module, "runs_flex_kernels", lambda device: True)
    monkeypatch.setattr(function, "select_path", recording)
    monkeypatch.setenv(FLEX_SETTING, "0")
    return paths
