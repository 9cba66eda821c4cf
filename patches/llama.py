"""LLaMA: its own rotary embedding at `rotary_emb`, grouped key heads, causal."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama import modeling_llama

from hf_posenc.schemes import Positions
from hf_posenc.schemes.base import STOCK_ROTATION

from .architecture import Architecture
from .attention_modules import PosEncAttention


class PosEncLlamaAttention(PosEncAttention, modeling_llama.LlamaAttention):
    stock_eager = staticmethod(modeling_llama.eager_attention_forward)

    def project_qk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_proj(states), self.k_proj(states)  # type: ignore[operator]

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        posenc: Positions | None = None,
        **kwargs: Any,
    ) -> Any:
        if posenc is not None:
            for index in posenc.active[self.layer_idx][STOCK_ROTATION]:
                angles = posenc.prepared[index][:2]
                position_embeddings = [angle.squeeze(1).to(hidden_states.dtype) for angle in angles]
        return super().forward(hidden_states, position_embeddings=position_embeddings, posenc=posenc, **kwargs)


LLAMA = Architecture(
    model_type="llama",
    family=modeling_llama.LlamaPreTrainedModel,
    base=modeling_llama.LlamaModel,
    attention={modeling_llama.LlamaAttention: PosEncLlamaAttention},
    layers="layers",
    self_attention="self_attn",
    rotary="rotary_emb",
    is_causal=lambda config: getattr(config, "is_causal", True),
)
