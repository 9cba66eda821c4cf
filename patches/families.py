"""The supported model families: one record each, and the attention subclass it needs."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from hf_posenc.attention import token_like
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import Positions
from hf_posenc.schemes.base import STOCK_ROTATION

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


class PosEncGPT2Attention(PosEncAttention, modeling_gpt2.GPT2Attention):
    stock_eager = staticmethod(modeling_gpt2.eager_attention_forward)

    def project_qk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, _ = self.c_attn(states).split(self.split_size, dim=-1)  # type: ignore[operator]
        return query, key


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


def _fill_token_types(inputs: dict[str, Any]) -> None:
    # Without token types, BERT's embeddings read a buffer as long as the trained length.
    if inputs.get("token_type_ids") is None:
        inputs["token_type_ids"] = torch.zeros_like(token_like(inputs), dtype=torch.long)


def _check_gpt2_config(config: Any) -> None:
    if config.reorder_and_upcast_attn:
        raise PosEncError(
            "reorder_and_upcast_attn=True computes attention outside transformers' attention interface, where no "
            "position scheme can act; set it to False"
        )


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
GPT2 = Architecture(
    model_type="gpt2",
    family=modeling_gpt2.GPT2PreTrainedModel,
    base=modeling_gpt2.GPT2Model,
    attention={modeling_gpt2.GPT2Attention: PosEncGPT2Attention},
    layers="h",
    self_attention="attn",
    table="wpe",
    is_causal=lambda config: getattr(config, "is_causal", True),
    check_config=_check_gpt2_config,
)
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
ARCHITECTURES = {architecture.model_type: architecture for architecture in (BERT, GPT2, LLAMA)}
"""The supported architectures by stock `model_type`."""
