"""The calculated needs of large models."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.scaling import SHAPES, UTILIZATION, Shape, setups

PUBLISHED = {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}
"""The number of parameters in the published checkpoints."""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters(shape: Shape) -> None:
    assert shape.parameters == PUBLISHED[shape.name]


def test_parameters_of_a_model() -> None:
    shape = Shape("tiny", 32, 3, 4, 2, 8, 40, vocabulary=61)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_speed_is_that_of_the_usual_estimate() -> None:
    """Six operations per parameter and token, and two more for checkpointing; attention adds little at 4k."""
    setup = next(setup for setup in setups() if setup.num_gpus == 64)
    estimate = 64 * 989e12 * UTILIZATION / (8 * setup.shape.parameters)
    assert 0.85 < setup.tokens_per_second(4096) / estimate < 1.1
