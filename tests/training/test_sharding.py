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
from hf_posenc.training.sharding import RAM_EFFICIENT_LOADING, check_saves_weights, whole_weights


class Zero3Config:
    """Stands for transformers' object that makes it partition weights while it loads."""

    def is_zero3(self) -> bool:
        return True


def arguments(config: Zero3Config, by_launcher: bool) -> Any:
    if by_launcher:
        return SimpleNamespace(deepspeed_plugin=SimpleNamespace(dschf=config))
    return SimpleNamespace(hf_deepspeed_config=config, deepspeed_plugin=None)


@pytest.mark.parametrize("by_launcher", [True, False])
def test_models_are_loaded_whole(by_launcher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAM_EFFICIENT_LOADING, "true")
    config = Zero3Config()
    set_hf_deepspeed_config(config)
    try:
        assert is_deepspeed_zero3_enabled()
        with pytest.raises(ValueError, match="inside"), whole_weights(arguments(config, by_launcher)):
            assert not is_deepspeed_zero3_enabled()
            assert RAM_EFFICIENT_LOADING not in os.environ
            raise ValueError("inside")
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
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    if is_refused:
        with pytest.raises(PosEncError, match="zero3_save_16bit_model: true"):
            check_saves_weights(accelerator)
    else:
        check_saves_weights(accelerator)
