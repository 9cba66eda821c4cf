"""What the gallery shows of each scheme: a small model trained with it, and its numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AutoModel, GPT2Config, PreTrainedModel

from hf_posenc.errors import SequenceLengthError
from hf_posenc.registry import SchemeInfo
from hf_posenc.schemes import Kind
from scripts.small_models import LENGTH, train

STEPS, ROWS = 200, 16
LONGER = 4 * LENGTH
HELD_OUT = 64 * LONGER
"""Tokens at the end of the text that no model is trained on."""
ALONGSIDE = {Kind.TEMPERATURE: "rope"}
"""Kinds of scheme that carry no order, and the scheme that they are trained together with."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What is measured of a scheme."""

    parameters: int
    """Parameters that it adds to GPT-2 small."""
    perplexity: float
    """On held-out text, at the trained length."""
    longer_perplexity: float | None
    """At four times the trained length; None if the model refuses such inputs."""


def spec_from_scratch(info: SchemeInfo) -> Any:
    """The scheme for training from scratch on `LENGTH` tokens: random parameters, and every table row trained."""
    options: dict[str, Any] = {}
    if "init" in info.options and "'paper'" in info.options["init"].type:
        options["init"] = "paper"
    if "max_distance" in info.options:
        options["max_distance"] = min(info.options["max_distance"].default, LENGTH // 2)
    if info.name == "temperature":
        options["form"] = "ssmax"  # the other form has no effect on inputs as short as these
    spec = {"type": info.name, **options} if options else info.name
    return [ALONGSIDE[info.kind], spec] if info.kind in ALONGSIDE else spec


def train_model(info: SchemeInfo, text: torch.Tensor, steps: int = STEPS) -> PreTrainedModel:
    """A small GPT-2, trained with the scheme from scratch."""
    return train(spec_from_scratch(info), text[:-HELD_OUT], steps, rows=ROWS)[0]


def measure(info: SchemeInfo, model: PreTrainedModel, text: torch.Tensor) -> Numbers:
    held_out = text[-HELD_OUT:]
    at_trained_length = perplexity(model, held_out, LENGTH)
    assert at_trained_length is not None
    return Numbers(count_parameters(info), at_trained_length, perplexity(model, held_out, LONGER))


@torch.no_grad()
def perplexity(model: PreTrainedModel, text: torch.Tensor, length: int) -> float | None:
    """Perplexity on windows of this length; None if they are longer than the model accepts."""
    losses = []
    for rows in text.view(-1, length).split(max(1, 2048 // length)):
        try:
            losses += [model(rows, labels=rows).loss] * len(rows)
        except SequenceLengthError:
            return None
    return torch.stack(losses).mean().exp().item()


def count_parameters(info: SchemeInfo) -> int:
    """Parameters that the scheme adds to GPT-2 small."""
    spec: Any = {"type": info.name, "form": "ssmax"} if info.name == "temperature" else info.name
    with torch.device("meta"):
        stock, variant = (AutoModel.from_config(GPT2Config(**scheme)) for scheme in ({}, {"position_scheme": spec}))
    own_table = stock.wpe.weight.numel()
    kept = any(name.endswith("wpe.weight") for name, _ in variant.named_parameters())
    return variant.num_parameters() - stock.num_parameters() + (0 if kept else own_table)
