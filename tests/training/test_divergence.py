"""The chunked KL divergence equals the plain computation, for dense, projected and truncated predictions."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.training import divergence
from hf_posenc.training.divergence import Logits, ProjectedLogits, Target, TopLogProbs, kl_divergence, top_log_probs
from tests.support.tensor_sizes import LargestTensor

ROWS, LENGTH, WIDTH, VOCABULARY, CHUNK = 2, 7, 5, 61, 3
TENSOR_KINDS = ["dense", "projected"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", CHUNK * VOCABULARY)


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Hidden states, weight and bias of a student's head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, LENGTH, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_(True) for tensor in tensors]


def teacher_logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.randn(ROWS, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)


def padding() -> torch.Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 4:] = 0
    return mask


def student_logits(kind: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Logits:
    if kind == "dense":
        return torch.nn.functional.linear(hidden, weight, bias)
    return ProjectedLogits(hidden, weight, bias, weight.dtype)


def plain_divergence(target: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    target_log, log = target.log_softmax(-1), logits.log_softmax(-1)
    values = (target_log.exp() * (target_log - log)).sum(-1)
    return values.mean() if mask is None else values[mask.bool()].mean()


def plain_top_divergence(top: TopLogProbs, logits: torch.Tensor) -> torch.Tensor:
    log = logits.log_softmax(-1).gather(-1, top.ids_BNK.long())
    rest, student_rest = top.log_rest_BN, (1 - log.exp().sum(-1)).log()
    values = (top.log_probs_BNK.exp() * (top.log_probs_BNK - log)).sum(-1) + rest.exp() * (rest - student_rest)
    return values.mean()


@pytest.mark.parametrize("target_kind", [*TENSOR_KINDS, "top"])
@pytest.mark.parametrize("kind", TENSOR_KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradients(kind: str, target_kind: str, masked: bool) -> None:
    """A target of the whole vocabulary gives the full divergence."""
    tensors, mask = inputs(), padding() if masked else None
    dense_target = teacher_logits()
    target: Target = dense_target
    if target_kind == "projected":
        hidden, weight, bias = (2 * tensor.detach().roll(1, 0) for tensor in inputs())
        target, dense_target = ProjectedLogits(hidden, weight, bias, torch.float64), hidden @ weight.T + bias
    elif target_kind == "top":
        target = top_log_probs(dense_target, 2 * VOCABULARY)
        assert target.ids_BNK.dtype == torch.int32
    expected = plain_divergence(dense_target, torch.nn.functional.linear(*tensors), mask)
    actual = kl_divergence(target, student_logits(kind, *tensors), mask)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(3 * value, tensors) for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    other = plain_divergence(dense_target, torch.nn.functional.linear(*tensors), None if masked else padding())
    assert abs(other - expected) > 1e-3, "control: padding changes the result"


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_most_likely_tokens_give_a_lower_bound(kind: str) -> None:
    tensors, target = inputs(), teacher_logits()
    full = kl_divergence(target, student_logits(kind, *tensors)).item()
    values = []
    for k in (1, 8, 40):
        top = top_log_probs(target, k)
        actual = kl_divergence(top, student_logits(kind, *tensors))
        expected = plain_top_divergence(top, torch.nn.functional.linear(*tensors))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
        gradients = [torch.autograd.grad(value, tensors) for value in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-13)
        values.append(actual.item())
    assert sorted([*values, full]) == [*values, full]
    assert values[0] < 0.9 * full, "control: one token is not enough"


def test_rounded_log_probs_are_normalized() -> None:
    """Float16 rounds log-probabilities by up to 0.4 %; a student equal to the teacher still has no loss to speak of."""
    target = teacher_logits()
    top = top_log_probs(target, 16)
    rounded = TopLogProbs(top.log_probs_BNK.half(), top.ids_BNK, top.log_rest_BN.half())
    assert 0 <= kl_divergence(rounded, target).item() < 1e-5


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_half_precision(kind: str) -> None:
    """Softmaxes are taken in float32 for either dtype, and gradients have the dtype of what they belong to."""
    target = teacher_logits().bfloat16()
    single = [tensor.detach().bfloat16().float().requires_grad_(True) for tensor in inputs()]
    expected = plain_divergence(target.float(), torch.nn.functional.linear(*single), None)
    actual = kl_divergence(target, student_logits(kind, *single))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    half = [tensor.detach().bfloat16().requires_grad_(True) for tensor in single]
    rounded = kl_divergence(target, student_logits(kind, *half))
    rounded.backward()
    torch.testing.assert_close(rounded, expected, rtol=2e-2, atol=0)
    assert {tensor.grad.dtype for tensor in half if tensor.grad is not None} == {torch.bfloat16}


def test_projection_follows_autocast() -> None:
    hidden, weight, _ = inputs(torch.float32)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = torch.nn.Parameter(weight.detach())
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = ProjectedLogits.from_head(hidden, head), head(hidden)
    assert torch.equal(logits.dense(), expected.float())
    assert not torch.equal(ProjectedLogits.from_head(hidden, head).dense(), expected.float()), "control: no autocast"
    kl_divergence(teacher_logits(), logits).backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32


def test_frozen_head() -> None:
    hidden, weight, bias = inputs()
    kl_divergence(teacher_logits(), ProjectedLogits(hidden, weight.detach(), bias.detach(), torch.float64)).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not kl_divergence(teacher_logits(), ProjectedLogits(hidden, weight, bias, torch.float64)).requires_grad


def test_logits_never_exist_as_a_whole() -> None:
    """The largest tensor is a chunk of logits, or the gradient of the weight."""
    tensors, target = inputs(), [tensor.detach() for tensor in inputs()]
    largest = {}
    for kind in TENSOR_KINDS:
        with LargestTensor(torch.Tensor.numel) as tracker:
            kl_divergence(student_logits(kind, *target), student_logits(kind, *tensors)).backward()
        largest[kind] = tracker.numbers
    assert largest["projected"] == VOCABULARY * max(WIDTH, CHUNK)
    assert largest["dense"] == ROWS * LENGTH * VOCABULARY, "control"
