"""A tiny model with a scheme, run through the generated kernels and by eager attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from tests.gpu_harness import backend, launcher
from tests.support import tiny_models as tiny

LENGTH = 140
"""More than one block of queries and of keys, and not a multiple of any block size."""
FLOAT32_TOLERANCE = 2e-5
"""Some hundred terms are summed in another order, each with a rounding error of 6e-8."""
BFLOAT16_ROUNDING = 2**-8
HEADS = {"llama": {"num_attention_heads": 2, "num_key_value_heads": 1}, "gpt2": {"n_head": 2}}
"""LLaMA has grouped key heads. The head size is 32, because flex_attention takes at least 16 on a GPU."""


class Result(NamedTuple):
    """What a run computed."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Situation:
    """A model and its inputs.

    Attributes:
        architecture: `llama` for grouped heads, `gpt2` for as many key heads as heads, `bert` for both directions.
        inputs: `plain`, `padded`, `packed`, or `decode`: one new token after cached ones.
        dtype: of the model.
    """

    architecture: str
    inputs: str
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.architecture}-{self.inputs}-{str(self.dtype).removeprefix('torch.')}"

    def build(self, scheme: Any) -> Any:
        """The model, with one layer."""
        if self.architecture == "gpt2":
            sizes = {"n_embd": 64, "n_layer": 1, "n_positions": 256}
        else:
            sizes = {"hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 256}
        heads = HEADS.get(self.architecture, {"num_attention_heads": 2})
        return tiny.model(self.architecture, scheme, self.dtype, **sizes, **heads)

    def run(self, model: Any) -> Result:
        """Logits of visible tokens, and the gradients of all parameters unless the model decodes."""
        ids = tiny.tokens(2, LENGTH)
        if self.inputs == "decode":
            return Result(_decode(model, ids), {})
        options: dict[str, Any] = {} if self.architecture == "bert" else {"use_cache": False}
        visible = torch.ones_like(ids)
        if self.inputs == "padded":
            visible = tiny.padding_mask(ids, [0, -9 if self.architecture == "bert" else 9])
            options["attention_mask"] = visible
        if self.inputs == "packed":
            documents = [torch.arange(LENGTH // 3), torch.arange(LENGTH - LENGTH // 3)]
            options["position_ids"] = torch.cat(documents).expand(2, -1)
        model.zero_grad()
        logits = model(ids, **options).logits[visible.bool()]
        logits.float().square().mean().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return Result(logits.detach(), {name: gradient.clone() for name, gradient in gradients.items()})


@torch.no_grad()
def _decode(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the last token. Only its attention is in question, so eager attention fills the cache."""
    backend_name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    model.set_attn_implementation(backend_name)
    logits: torch.Tensor = model(ids[:, -1:], past_key_values=cache).logits
    return logits


def run_kernels(situation: Situation, model: Any) -> Result:
    """Run the model through the generated kernels."""
    model.set_attn_implementation("flex_attention")
    with backend.gpu_kernels():
        result = situation.run(model)
    templates = [kernel for kernel in launcher.LAUNCHES if kernel.kind == "template"]
    assert len(templates) == (1 if situation.inputs == "decode" else 2), "a forward and a backward kernel must run"
    return result


def run_eager(situation: Situation, model: Any) -> Result:
    """Run the model by eager attention."""
    model.set_attn_implementation("eager")
    return situation.run(model)


def relative_errors(result: Result, expected: Result) -> dict[str, float]:
    """The distance of logits and of each gradient from what is expected, relative to its norm.

    A gradient that is zero but for rounding counts relative to the largest one: kerple's and deberta's biases, for
    example, cancel in the softmax.
    """
    assert result.gradients.keys() == expected.gradients.keys()
    largest = max((gradient.double().norm() for gradient in expected.gradients.values()), default=torch.tensor(0.0))
    pairs = {name: (result.gradients[name], gradient) for name, gradient in expected.gradients.items()}
    errors = {}
    for name, (actual, wanted) in {"logits": (result.logits, expected.logits), **pairs}.items():
        floor = 0.0 if name == "logits" else 1e-4 * float(largest)
        norm = max(float(wanted.double().norm()), floor)
        errors[name] = float((actual.double() - wanted.double()).norm()) / norm
    return errors


def wrong(
    situation: Situation,
    scheme: Any,
    model: Any = None,
    run: Callable[[Situation, Any], Result] = run_kernels,
) -> dict[str, float]:
    """Logits and gradients that the kernels compute wrongly, with their relative errors; empty if all are right.

    In float32, kernels and eager attention differ by the order of sums. In bfloat16, both are compared with the same
    weights in float32, and the kernels may be at most twice as far off as eager attention, plus a rounding error.

    Args:
        situation: the model and its inputs.
        scheme: a value of `position_scheme`.
        model: replaces the model that runs through the kernels; a control passes another one.
        run: runs a model through the kernels, by default those of flex_attention.
    """
    reference = situation.build(scheme)
    result = run(situation, reference if model is None else model)
    eager = run_eager(situation, reference)
    if situation.dtype == torch.float32:
        return {name: error for name, error in relative_errors(result, eager).items() if not error < FLOAT32_TOLERANCE}
    expected = run_eager(situation, reference.float())
    limits = {name: 2 * error + BFLOAT16_ROUNDING for name, error in relative_errors(eager, expected).items()}
    return {name: error for name, error in relative_errors(result, expected).items() if not error < limits[name]}
