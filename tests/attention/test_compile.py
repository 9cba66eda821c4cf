"""torch.compile(fullgraph=True), torch.export and flex_attention equal eager execution on SDPA.

Tolerances are those of float32 sums in another order; tests/integration/test_matrix.py runs in float64, to 1e-10.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, CASES, Case


def pairs_with_fast(*fast: tuple[str, str], architectures: list[str] = ARCHITECTURES, cases: list[Case] = CASES) -> Any:
    """Parametrize with all cases, on one architecture each in turn; `make test` runs only the `fast` pairs.

    What a compiler sees of a scheme is the same in all architectures; test_matrix.py runs all pairs uncompiled.
    """
    rows = []
    for index, case in enumerate(cases):
        allowed = [name for name in architectures if not (case.causal and name == "bert")]
        fast_names = [name for case_id, name in fast if case_id == case.id]
        for architecture in dict.fromkeys([*fast_names, allowed[index % len(allowed)]]):
            marks = [] if architecture in fast_names else [pytest.mark.slow]
            rows.append(pytest.param(case, architecture, id=f"{architecture}-{case.id}", marks=marks))
    return pytest.mark.parametrize(("case", "architecture"), rows)


@pytest.fixture(autouse=True)
def reset_compiler() -> None:
    torch._dynamo.reset()


# Every compilation takes seconds, so `make test` compiles a few kinds only: a rotation here, and a bias by
# distance below; test_flex.py has flex_attention.
@pairs_with_fast(("rope", "llama"))
def test_compiled_model_equals_eager_execution(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for inputs in ({}, {"attention_mask": mask}, {"position_ids": packed}):
            expected = model(ids, use_cache=False, **inputs).logits
            logits = compiled(ids, use_cache=False, **inputs).logits
            visible = slice(4, None) if "attention_mask" in inputs else slice(None)
            torch.testing.assert_close(logits[:, visible], expected[:, visible], rtol=0, atol=1e-5)


@pairs_with_fast()
def test_compiled_training_step_equals_eager_execution(case: Case, architecture: str) -> None:
    gradients = []
    for compiled in (False, True):
        model = tiny.model(architecture, case.scheme, torch.float32).train()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        run(tiny.tokens(2, 12), use_cache=False).logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5)


@pairs_with_fast(("t5", "gpt2"), architectures=["gpt2", "llama"])
def test_compiled_static_decoding_equals_dynamic(case: Case, architecture: str) -> None:
    """generate() with a static cache compiles the decoding step. Rows are padded, so that positions differ by row."""
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids[0, :3] = tiny.PAD
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    generated = model.generate(ids, **settings, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(generated, expected)


@pairs_with_fast(("rope", "llama"))
def test_exported_program_equals_the_model(case: Case, architecture: str) -> None:
    """With a dynamic sequence length, at the length of the export and at another one."""
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 12)
    length = torch.export.Dim("length", min=2, max=tiny.TRAINED_LENGTH)
    extra = {} if architecture == "bert" else {"use_cache": False}
    shapes = {"input_ids": {1: length}, **dict.fromkeys(extra)}
    with torch.no_grad():
        settings = {"strict": False, "dynamic_shapes": shapes}
        program = torch.export.export(model, (), {"input_ids": ids, **extra}, **settings).module()
        for input_ids in (ids, tiny.tokens(2, 31, seed=4)):
            logits, expected = (run(input_ids=input_ids, **extra).logits for run in (program, model))
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


FLEX_CASES = [case for case in CASES if not case.values and not case.remaps]


@pairs_with_fast(cases=FLEX_CASES)
def test_flex_equals_sdpa(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    per_head_mask = tiny.additive_mask(torch.ones(2, 4, 12, 12).tril().bool(), torch.float32)
    per_head_mask[:, 1, :, 2] = torch.finfo(torch.float32).min
    all_inputs = [{}, {"attention_mask": mask}, {"position_ids": packed}, {"position_ids": packed[:1]}]
    all_inputs.append({"attention_mask": per_head_mask})
    with torch.no_grad():
        sdpa_logits = [model(ids, **inputs).logits for inputs in all_inputs]
        model.set_attn_implementation("flex_attention")
        for inputs, expected in zip(all_inputs, sdpa_logits, strict=True):
            visible = slice(4, None) if "attention_mask" in inputs else slice(None)
            logits = model(ids, **inputs).logits
            torch.testing.assert_close(logits[:, visible], expected[:, visible], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "architecture"), [("t5", "llama"), ("rope", "gpt2")])
def test_flex_decodes_from_a_cache(scheme: str, architecture: str) -> None:
    model, ids = tiny.model(architecture, scheme, torch.float32), tiny.tokens(2, 8)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    model.set_attn_implementation("flex_attention")
    assert torch.equal(model.generate(ids, **settings), expected)
