"""Right-padded prompts: outputs at padding, which `generate` reads, are defined, and new tokens continue the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import tiny_models as tiny
from tests.support.cases import DECODERS
from tests.support.sampling import combinations

PADDED = [0, -3, -1]
"""How many slots at the end of each row are padding."""
SCHEMES = ["alibi", "t5", "deberta", "tupe", "rope", "learned", {"type": "shaw", "max_distance": 4}]


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.tokens(3, 9)
    mask = tiny.padding_mask(ids, PADDED)
    return ids * mask, mask


@combinations(architecture=DECODERS, scheme=SCHEMES)
def test_generation_does_not_depend_on_cache_or_backend(architecture: str, scheme: Any) -> None:
    model = tiny.model(architecture, scheme)
    ids, mask = prompt()
    expected = tiny.generate_logits(model, ids, mask, use_cache=False)
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        for options in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
            logits = tiny.generate_logits(model, ids, mask, **options)
            torch.testing.assert_close(logits, expected, **tiny.tolerances(architecture))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_new_tokens_continue_the_prompt(scheme: Any) -> None:
    """Given the same first new token, a right-padded row goes on as the row without padding does."""
    model = tiny.model("gpt2", scheme)
    ids, mask = prompt()
    padded = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    for row, count in enumerate(mask.sum(-1).tolist()):
        first = torch.cat([ids[row, :count], padded[row, 9:10]])[None]
        alone = model.generate(first, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        assert torch.equal(alone[0, count:], padded[row, 9:])


@combinations(
    architecture=["bert", "gpt2", "llama"], scheme=["alibi", "t5", "deberta", "tupe"], with_positions=[False, True]
)
@torch.no_grad()
def test_outputs_at_padding_after_the_tokens_are_the_same_on_all_backends(
    architecture: str, scheme: str, with_positions: bool
) -> None:
    model = tiny.model(architecture, scheme)
    ids, mask = prompt()
    inputs = {"attention_mask": mask}
    if with_positions:
        inputs["position_ids"] = (mask.cumsum(-1) - 1) * mask
    expected = model(ids, **inputs).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids, **inputs).logits, expected, **tiny.tolerances(architecture))
    shifted = model(ids, **{**inputs, "attention_mask": tiny.padding_mask(ids, [0, -2, -1])}).logits
    assert not torch.allclose(shifted[1], expected[1], rtol=0, atol=1e-3)  # control


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_gradients_at_padding_are_those_of_a_dense_bias(scheme: str) -> None:
    model = tiny.model("gpt2", scheme)
    ids, mask = prompt()
    gradients = []
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        model(ids, attention_mask=mask).logits[:, -1].square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][name] is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-9)
