"""GPT-2: a learned table at `wpe`, one fused projection, causal."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt2 import modeling_gpt2

from hf_posenc.errors import PosEncError

from .architecture import Architecture
from .attention_modules import PosEncAttention


class PosEncGPT2Attention(PosEncAttention, modeling_gpt2.GPT2Attention):
    stock_eager = staticmethod(modeling_gpt2.eager_attention_forward)

    def project_qk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, _ = self.c_attn(states).split(self.split_size, dim=-1)  # type: ignore[operator]
        return query, key


def _check_config(config: Any) -> None:
    if config.reorder_and_upcast_attn:
        raise PosEncError(
            "reorder_and_upcast_attn=True computes attention outside transformers' attention interface, where no "
            "position scheme can act; set it to False"
        )


GPT2 = Architecture(
    model_type="gpt2",
    family=modeling_gpt2.GPT2PreTrainedModel,
    base=modeling_gpt2.GPT2Model,
    attention={modeling_gpt2.GPT2Attention: PosEncGPT2Attention},
    layers="h",
    self_attention="attn",
    table="wpe",
    is_causal=lambda config: getattr(config, "is_causal", True),
    check_config=_check_config,
)
