"""Compare complete models: a model of transformers that equals one of our architectures with a scheme.

Our model runs on the weights of the oracle, renamed and rearranged, so one comparison covers the output and its
gradient with respect to every weight of the oracle. Everything is float64, even where the oracle would use float32
(`in_float64`).
"""

from __future__ import annotations

import contextlib
import importlib
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import tiny_models as tiny

LENGTH, WIDTH, HEADS = 14, 96, 6
HEAD_SIZE = WIDTH // HEADS  # a quarter of it rotates at two frequencies; with one, theta would not matter
SIZES = {"vocab_size": tiny.VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS}
SIZES |= {"pad_token_id": tiny.PAD, "bos_token_id": 1, "eos_token_id": 2}
MLP_SIZES = {"intermediate_size": 40}

T5_SIZES = {"d_kv": HEAD_SIZE, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
T5_SCHEME = {"type": "t5", "num_buckets": 8, "max_distance": 10}
T5_PERTURBATION = 0.01 * torch.arange(8, dtype=torch.float64)[:, None]
"""A change of the table for controls. A constant would change nothing."""

EQUAL = 1e-9
"""Largest difference between two float64 runs that sum in a different order, through three layers and back."""
DIFFERENT = 1e-4
"""Smallest difference that a control must make in the output and in a gradient; far above rounding."""

Weights = dict[str, torch.Tensor]


def randomised_oracle(oracle: nn.Module) -> Any:
    """The oracle in float64 with random weights."""
    return tiny.randomise(to_float64(oracle)).eval()


def to_float64(model: Any) -> Any:
    """The model in float64, but for the frequencies of rotations: both sides compute angles in float32."""
    model.to(torch.float64)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.to(torch.float32)
    return model


@contextlib.contextmanager
def in_float64(*model_types: str) -> Iterator[None]:
    """Make the code of these models use float64 where it asks for float32.

    They compute norms or softmax in float32 whatever their dtype, and its rounding would hide smaller differences.
    Integers still become float32: our angles and T5's buckets are computed from those.
    """
    float64_torch = types.ModuleType("torch")
    float64_torch.__dict__.update(vars(torch), float32=torch.float64)
    to_float32 = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else to_float32(self))
        for name in model_types:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            patch.setattr(module, "torch", float64_torch)
        yield


def rename_weights(oracle: nn.Module, rules: dict[str, str]) -> Weights:
    """The oracle's weights under our names, by regular expressions."""
    weights = dict(oracle.named_parameters())
    for pattern, replacement in rules.items():
        weights = {re.sub(pattern, replacement, name): weight for name, weight in weights.items()}
    return weights


def run_with_weights(model: Any, weights: Weights, *inputs: Any, **named_inputs: Any) -> torch.Tensor:
    """Run our model on these weights. Biases and token types that the oracle lacks are zero."""
    model = to_float64(model).eval()
    parameters = dict(model.named_parameters())
    missing = {name for name in parameters.keys() - weights.keys() if name.endswith("bias") or "token_type" in name}
    weights = weights | {name: torch.zeros_like(parameters[name]) for name in missing}
    assert weights.keys() == parameters.keys()
    return torch.func.functional_call(model, weights, inputs, named_inputs).last_hidden_state


def largest_differences(oracle: nn.Module, expected: torch.Tensor, output: torch.Tensor) -> tuple[float, float]:
    """The largest difference of the output, and of the gradient of a weighted sum of it to any weight of the oracle."""
    weighting = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    trained = [parameter for parameter in oracle.parameters() if parameter.requires_grad]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    theirs = torch.autograd.grad((expected * weighting).sum(), trained, **options)
    ours = torch.autograd.grad((output * weighting).sum(), trained, **options)
    gradients = [(mine - other).abs().max().item() for mine, other in zip(ours, theirs, strict=True)]
    return (output - expected).abs().max().item(), max(gradients)


def assert_equal(oracle: nn.Module, expected: torch.Tensor, output: torch.Tensor, atol: float = EQUAL) -> None:
    output_difference, gradient_difference = largest_differences(oracle, expected, output)
    assert output_difference < atol
    assert gradient_difference < atol


def assert_different(oracle: nn.Module, expected: torch.Tensor, output: torch.Tensor) -> None:
    output_difference, gradient_difference = largest_differences(oracle, expected, output)
    assert output_difference > DIFFERENT
    assert gradient_difference > DIFFERENT
