"""BERT: a learned table in its embeddings; an encoder, or a decoder if the config says so."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bert import modeling_bert

from hf_posenc.attention import token_like

from .architecture import Architecture
from .attention_modules import PosEncAttention


class PosEncBertSelfAttention(PosEncAttention, modeling_bert.BertSelfAttention):
    stock_eager = staticmethod(modeling_bert.eager_attention_forward)

    def project_qk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.query(states), self.key(states)  # type: ignore[operator]


class PosEncBertCrossAttention(modeling_bert.BertCrossAttention):
    """Positions act in self-attention only, but the layer passes its arguments to both."""

    def forward(self, *args: Any, posenc: object = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def _fill_token_types(inputs: dict[str, Any]) -> None:
    # Without token types, the stock embeddings read a buffer as long as the trained length.
    if inputs.get("token_type_ids") is None:
        inputs["token_type_ids"] = torch.zeros_like(token_like(inputs), dtype=torch.long)


BERT = Architecture(
    model_type="bert",
    family=modeling_bert.BertPreTrainedModel,
    base=modeling_bert.BertModel,
    attention={
        modeling_bert.BertSelfAttention: PosEncBertSelfAttention,
        modeling_bert.BertCrossAttention: PosEncBertCrossAttention,
    },
    layers="encoder.layer",
    self_attention="attention.self",
    cross_attention="crossattention.self",
    table="embeddings.position_embeddings",
    constant="embeddings.token_type_embeddings",
    is_causal=lambda config: config.is_decoder,
    fill_inputs=_fill_token_types,
)
