"""The hidden-state loss: a relative squared error that massive activations do not dominate."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.training.distillation import hidden_state_distance

ROWS, LENGTH, WIDTH, MASSIVE = 2, 32, 16, 1e4


def states(seed: int = 0) -> torch.Tensor:
    """Channels differ in scale, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.linspace(0.5, 3.0, WIDTH)
    return scales * torch.randn(ROWS, LENGTH, WIDTH, generator=generator)


def test_small_errors_are_relative() -> None:
    target = states()
    assert hidden_state_distance(target, target).item() == 0
    relative = 0.01
    scale = target.square().mean(1, keepdim=True).sqrt()
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    value = hidden_state_distance(target + relative * scale * noise, target).item()
    assert value == pytest.approx(relative**2, rel=0.1)
    both = hidden_state_distance(100 * (target + relative * scale * noise), 100 * target).item()
    assert both == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("who", ["teacher", "student", "both"])
def test_massive_activations(who: str) -> None:
    """They change the loss by little, and no gradient grows; the plain relative error explodes."""
    target, student = states(), states(1)
    usual = hidden_state_distance(student.clone().requires_grad_(True), target)
    if who in ("teacher", "both"):
        target[:, 0, 3] = MASSIVE
    if who in ("student", "both"):
        student[:, 5, 3] = MASSIVE
    student.requires_grad_(True)
    loss = hidden_state_distance(student, target)
    loss.backward()
    assert loss.item() == pytest.approx(usual.item(), rel=0.6)
    assert student.grad is not None
    largest = student.grad.norm(dim=-1).max(-1).values / student.grad.norm(dim=-1).median(-1).values
    assert largest.max() < 5
    plain = ((student - target).square().mean(-1) / target.square().mean(-1)).mean()
    assert who == "teacher" or plain > 1e4, "control"


def test_rows_do_not_depend_on_each_other_or_on_padding() -> None:
    target, student = states(), states(1)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 10:] = 0
    whole = hidden_state_distance(student, target, mask) * mask.sum()
    first = hidden_state_distance(student[:1], target[:1]) * LENGTH
    second = hidden_state_distance(student[1:, :10], target[1:, :10]) * 10
    torch.testing.assert_close(whole, first + second)
    unmasked = hidden_state_distance(student, target) * ROWS * LENGTH
    assert abs(unmasked - whole) > 1, "control"


def test_all_padding_and_short_rows() -> None:
    target, student = states(), states(1).requires_grad_(True)
    mask = torch.ones(ROWS, LENGTH)
    mask[1] = 0
    hidden_state_distance(student, target, mask).backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert not student.grad[1].any()
    one_token = hidden_state_distance(student[:, :1], target[:, :1].bfloat16())
    assert 0 < one_token.item() < 5
