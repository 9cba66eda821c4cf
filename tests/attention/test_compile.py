"""torch.compile(fullgraph=True), torch.export and flex_attention, against the plain forward.

Tolerances are those of float32 sums taken in another order; test_matrix holds the same checks to 1e-10 in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, Case


def sampled(*kept: tuple[str, str], architectures: list[str] = ARCHITECTURES, cases: list[Case] = CASES) -> Any:
    """All cases on all architectures, of which `make test` runs the ones kept."""
    rows = []
    for case in cases:
        for architecture in architectures:
            if case.causal and architecture == "bert":
                continue
            marks = [] if (case.id, architecture) in kept else [pytest.mark.slow]
            rows.append(pytest.param(case, architecture, id=f"{architecture}-{case.id}", marks=marks))
    return pytest.mark.parametrize(("case", "architecture"), rows)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@sampled(
    *[("rope", "llama"), ("t5", "gpt2"), ("alibi", "bert"), ("learned", "gpt2"), ("sinusoidal+rope+alibi", "llama")],
    *[("shaw", "gpt2"), ("transformer_xl", "llama"), ("tupe", "bert"), ("deberta", "llama"), ("cope", "gpt2")],
    ("window-context", "gpt2"),
)
def test_compiled_fullgraph_equals_plain(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for inputs in ({}, {"attention_mask": mask}, {"position_ids": packed}):
            expected = model(ids, use_cache=False, **inputs).logits
            found = compiled(ids, use_cache=False, **inputs).logits
            visible = slice(4, None) if "attention_mask" in inputs else slice(None)
            torch.testing.assert_close(found[:, visible], expected[:, visible], rtol=0, atol=1e-5)


@sampled(("t5", "llama"), ("rope", "gpt2"), ("alibi", "bert"), ("deberta", "bert"))
def test_compiled_training_step_equals_plain(case: Case, architecture: str) -> None:
    gradients = []
    for compiled in (False, True):
        model = tiny.model(architecture, case.scheme, torch.float32).train()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        run(tiny.tokens(2, 12), use_cache=False).logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5)


@sampled(
    ("rope", "llama"),
    ("t5", "gpt2"),
    ("sinusoidal-context", "gpt2"),
    ("cope", "llama"),
    architectures=["gpt2", "llama"],
)
def test_compiled_static_decoding_equals_dynamic(case: Case, architecture: str) -> None:
    """generate() with a static cache compiles the decoding step; padded rows, so that positions differ by row."""
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids[0, :3] = tiny.PAD
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, **settings)
    from transformers import CompileConfig

    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled = model.generate(ids, **settings, cache_implementation="static", compile_config=compiling)
    assert torch.equal(compiled, plain)


@sampled(("rope", "llama"), ("t5", "gpt2"), ("alibi", "bert"), ("sinusoidal", "bert"), ("learned", "gpt2"))
def test_exported_program_equals_plain(case: Case, architecture: str) -> None:
    """Exported with a length that is left open, and run at another one than it was exported with."""
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 12)
    length = torch.export.Dim("length", min=2, max=tiny.TRAINED_LENGTH)
    extra = {} if architecture == "bert" else {"use_cache": False}
    shapes = {"input_ids": {1: length}, **dict.fromkeys(extra)}
    with torch.no_grad():
        settings = {"strict": False, "dynamic_shapes": shapes}
        program = torch.export.export(model, (), {"input_ids": ids, **extra}, **settings).module()
        for inputs in (ids, tiny.tokens(2, 31, seed=4)):
            found, expected = (run(input_ids=inputs, **extra).logits for run in (program, model))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


FLEXIBLE = [case for case in CASES if not case.values]


@sampled(
    ("rope", "gpt2"), ("t5", "llama"), ("deberta", "bert"), ("alternating", "llama"), ("cope", "gpt2"), cases=FLEXIBLE
)
def test_flex_equals_sdpa(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    by_head = tiny.additive(torch.ones(2, 4, 12, 12).tril().bool(), torch.float32)
    by_head[:, 1, 6:, 2] = torch.finfo(torch.float32).min
    variants = [{}, {"attention_mask": mask}, {"position_ids": packed}, {"position_ids": packed[:1]}]
    variants.append({"attention_mask": by_head})
    with torch.no_grad():
        expected = [model(ids, **inputs).logits for inputs in variants]
        model.set_attn_implementation("flex_attention")
        for inputs, wanted in zip(variants, expected, strict=True):
            visible = slice(4, None) if "attention_mask" in inputs else slice(None)
            torch.testing.assert_close(model(ids, **inputs).logits[:, visible], wanted[:, visible], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("scheme", "architecture"), [("t5", "llama"), ("rope", "gpt2")])
def test_flex_decodes_from_a_cache(scheme: str, architecture: str) -> None:
    model, ids = tiny.model(architecture, scheme, torch.float32), tiny.tokens(2, 8)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    model.set_attn_implementation("flex_attention")
    assert torch.equal(model.generate(ids, **settings), expected)
