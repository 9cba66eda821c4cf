"""Models that a user derived from stock classes, in a module that other processes can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM


class ScaledGPT2(GPT2LMHeadModel):
    """GPT-2 with a parameter of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((), 0.5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.scale
        return outputs


class DoubledLlama(LlamaForCausalLM):
    """LLaMA whose head was changed without a parameter."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs
