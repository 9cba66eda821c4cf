"""A LLaMA-like model as remote code: a directory with its own config and model classes, and a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGURATION = """
from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    model_type = "MODEL_TYPE"

    def __init__(self, vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, intermediate_size=40, max_position_embeddings=48, rms_norm_eps=1e-6,
                 hidden_act="silu", mlp_bias=False, initializer_range=0.02, rope_parameters=None, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.hidden_act = hidden_act
        self.mlp_bias = mlp_bias
        self.initializer_range = initializer_range
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        super().__init__(**kwargs)
"""
MODELING = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward
)

from .configuration_own import OwnConfig


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.to_q = nn.Linear(config.hidden_size, config.hidden_size, bias=True)
        self.to_kv = nn.Linear(config.hidden_size, 2 * config.num_key_value_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.to_q(hidden_states).view(shape).transpose(1, 2)
        key, value = (x.reshape(shape).transpose(1, 2) for x in self.to_kv(hidden_states).chunk(2, dim=-1))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        states, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs
        )
        return self.out(states.reshape(*hidden_states.shape)), weights


class OwnBlock(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.mixer = OwnAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.norm_1 = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_2 = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.mixer(self.norm_1(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.norm_2(hidden_states))


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    config: OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([OwnBlock(config, index) for index in range(config.num_hidden_layers)])
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, use_cache=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + seen
        mask = create_causal_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask,
            past_key_values=past_key_values, position_ids=position_ids,
        )
        hidden_states = inputs_embeds
        angles = self.rotary_emb(hidden_states, position_ids)
        for block in self.blocks:
            hidden_states = block(
                hidden_states, position_embeddings=angles, attention_mask=mask, past_key_values=past_key_values,
                **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class OwnForCausalLM(OwnPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
        outputs = self.model(input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)
"""
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


def write_remote_model(directory: Path, model_type: str, *replacements: tuple[str, str]) -> Path:
    """Write remote code and a random checkpoint; see `write_remote_code`."""
    path = write_remote_code(directory, model_type, *replacements)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(path)
    return path


def write_remote_code(directory: Path, model_type: str, *replacements: tuple[str, str]) -> Path:
    """Write the directory of a checkpoint without its weights.

    Args:
        directory: The parent of the checkpoint's directory.
        model_type: The model type.
        *replacements: Changes to the source of the model: what stands there, and what shall.

    Returns:
        The checkpoint's directory.
    """
    path = directory / model_type
    path.mkdir()
    modeling = MODELING
    for old, new in replacements:
        assert modeling.count(old) == 1
        modeling = modeling.replace(old, new)
    (path / "configuration_own.py").write_text(CONFIGURATION.replace("MODEL_TYPE", model_type))
    (path / "modeling_own.py").write_text(modeling)
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": AUTO_MAP}))
    return path
