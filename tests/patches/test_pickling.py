"""Variants of a user's own classes can be pickled, and read in another process."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.patches import pickling
from tests.support import tiny_models as tiny
from tests.support.user_models import DoubledLlama, ScaledGPT2

MODELS: dict[str, tuple[type, str]] = {"gpt2": (ScaledGPT2, "t5"), "llama": (DoubledLlama, "alibi")}
READ = """
import pickle, sys, torch
model, ids, expected = pickle.load(open(sys.argv[1], "rb"))
assert torch.equal(model(ids).logits, expected)
print(type(model).__name__)
"""


def build(name: str, built_with_scheme: bool) -> Any:
    model_class, scheme = MODELS[name]
    torch.manual_seed(0)
    if built_with_scheme:
        return model_class(tiny.config(name, position_scheme=scheme)).eval()
    return hf_posenc.retrofit(model_class(tiny.config(name)).eval(), scheme)


def torch_saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), torch_saved])
@pytest.mark.parametrize("built_with_scheme", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_copies_of_own_classes(name: str, built_with_scheme: bool, copied: Any) -> None:
    model, ids = build(name, built_with_scheme), tiny.tokens()
    twin = copied(model)
    assert type(twin) is type(model)
    assert isinstance(twin, MODELS[name][0])
    assert torch.equal(twin(ids).logits, model(ids).logits)
    if not built_with_scheme:
        hf_posenc.restore(twin)
        assert type(twin) is MODELS[name][0]


@pytest.mark.slow
def test_own_classes_in_another_process(tmp_path: Path) -> None:
    model, ids = build("gpt2", True), tiny.tokens()
    path = tmp_path / "model.pkl"
    with torch.no_grad():
        path.write_bytes(pickle.dumps((model, ids, model(ids).logits)))
    result = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "PosEncScaledGPT2", result.stderr


def test_a_model_type_unknown_to_the_process_is_refused() -> None:
    with pytest.raises(PosEncError, match=r"hf_posenc\.support"):
        pickling.new_module("model", ScaledGPT2, "unheard_of")
