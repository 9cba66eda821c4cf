"""Loading whole weights in a sharded run, and configs that are refused."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)

from hf_posenc.errors import PosEncError
from hf_posenc.training.sharding import RAM_EFFICIENT_LOADING, check_zero3, whole_weights
from tests.support import tiny_models as tiny


class Zero3Config:
    """Stands for transformers' object that makes it partition weights while it loads."""

    def is_zero3(self) -> bool:
        return True


def arguments(config: Zero3Config, by_launcher: bool) -> Any:
    if by_launcher:
        return SimpleNamespace(deepspeed_plugin=SimpleNamespace(dschf=config))
    return SimpleNamespace(hf_deepspeed_config=config, deepspeed_plugin=None)


def zero_accelerator(zero: dict[str, Any]) -> Any:
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


@pytest.mark.parametrize("by_launcher", [True, False])
def test_models_are_loaded_whole(by_launcher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAM_EFFICIENT_LOADING, "true")
    config = Zero3Config()
    set_hf_deepspeed_config(config)
    try:
        assert is_deepspeed_zero3_enabled()
        with whole_weights(arguments(config, by_launcher)):
            assert not is_deepspeed_zero3_enabled()
            assert RAM_EFFICIENT_LOADING not in os.environ
        assert is_deepspeed_zero3_enabled()
        assert os.environ[RAM_EFFICIENT_LOADING] == "true"
    finally:
        unset_hf_deepspeed_config()


@pytest.mark.parametrize(
    ("zero", "is_refused"),
    [
        ({"stage": 3}, True),
        ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}, True),
        ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, False),
        ({"stage": 2}, False),
    ],
)
def test_zero3_must_gather_weights_on_saving(zero: dict[str, Any], is_refused: bool) -> None:
    accelerator = zero_accelerator(zero)
    model = tiny.model("llama", "t5")
    if is_refused:
        with pytest.raises(PosEncError, match="zero3_save_16bit_model: true"):
            check_zero3(model, accelerator)
    else:
        check_zero3(model, accelerator)


@pytest.mark.parametrize(("stage", "is_refused"), [(3, True), (2, False)])
def test_zero3_cannot_run_cope(stage: int, is_refused: bool) -> None:
    accelerator, model = zero_accelerator({"stage": stage}), tiny.model("llama", "cope")
    if is_refused:
        with pytest.raises(PosEncError, match="ZeRO-3 cannot run cope"):
            check_zero3(model, accelerator)
    else:
        check_zero3(model, accelerator)
