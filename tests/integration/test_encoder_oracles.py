"""Encoders of transformers that equal BERT with a scheme: MPNet, RoFormer, T5's attention."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertModel
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.t5.modeling_t5 import T5Attention

from tests.support import tiny_models as tiny
from tests.support.model_oracles import (
    HEAD_SIZE,
    LENGTH,
    MLP_SIZES,
    SIZES,
    T5_PERTURBATION,
    T5_SCHEME,
    T5_SIZES,
    assert_different,
    assert_equal,
    in_float64,
    randomised_oracle,
    rename_weights,
    run_with_weights,
)


def test_mpnet_equals_bert_with_learned_and_shared_t5() -> None:
    sizes = {**SIZES, **MLP_SIZES, "max_position_embeddings": 64}
    oracle = randomised_oracle(transformers.MPNetModel(transformers.MPNetConfig(**sizes), add_pooling_layer=False))
    rules = {
        r"attention\.attn\.q\b": "attention.self.query",
        r"attention\.attn\.k\b": "attention.self.key",
        r"attention\.attn\.v\b": "attention.self.value",
        r"attention\.attn\.o\b": "attention.output.dense",
        r"attention\.LayerNorm": "attention.output.LayerNorm",
        r"encoder\.relative_attention_bias": "position_scheme.1.table",
    }
    weights, ids = rename_weights(oracle, rules), tiny.tokens(2, LENGTH)
    positions = torch.arange(2, LENGTH + 2)[None].expand(2, -1)  # MPNet counts from 2

    def bert(**changes: Any) -> torch.Tensor:
        scheme = ["learned", {"type": "t5", "num_buckets": 32, "max_distance": 128, **changes}]
        model = BertModel(BertConfig(**sizes, position_scheme=scheme), add_pooling_layer=False)
        return run_with_weights(model, weights, ids, position_ids=positions)

    expected = oracle(ids, position_ids=positions).last_hidden_state
    assert_equal(oracle, expected, bert())
    assert_different(oracle, expected, bert(max_distance=64))


def test_roformer_equals_bert_with_interleaved_rope() -> None:
    """RoFormer rounds float64 angles to float32; ours are float32, so the oracle gets GPT-J's table, made like ours."""
    sizes = {**SIZES, **MLP_SIZES}
    oracle = randomised_oracle(
        transformers.RoFormerModel(transformers.RoFormerConfig(**sizes, max_position_embeddings=LENGTH))
    )
    oracle.encoder.embed_positions.weight.copy_(create_sinusoidal_positions(LENGTH, HEAD_SIZE))
    weights, ids = dict(oracle.named_parameters()), tiny.tokens(2, LENGTH)
    del weights["encoder.embed_positions.weight"]

    def bert(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "layout": "interleaved", **changes}
        return run_with_weights(
            BertModel(BertConfig(**sizes, position_scheme=scheme), add_pooling_layer=False), weights, ids
        )

    expected = oracle(ids).last_hidden_state
    assert_equal(oracle, expected, bert())
    assert_different(oracle, expected, bert(theta=9000.0))
    assert_different(oracle, expected, bert(layout="halves"))


def test_t5_attention_equals_bert_attention_with_t5() -> None:
    """BERT normalizes after attention and T5 before it, so a single attention of each gets the same hidden states."""
    config = transformers.T5Config(**SIZES, **T5_SIZES, attn_implementation="eager")
    oracle, ids = (
        randomised_oracle(T5Attention(config, has_relative_attention_bias=True, layer_idx=0)),
        tiny.tokens(2, LENGTH),
    )
    config = BertConfig(**SIZES | MLP_SIZES | {"num_hidden_layers": 1}, position_scheme=T5_SCHEME)
    model = randomised_oracle(BertModel(config, add_pooling_layer=False))
    rules = {r"^q\b": "self.query", r"^k\b": "self.key", r"^v\b": "self.value", r"^o\b": "output.dense"}
    weights = {f"encoder.layer.0.attention.{name}": weight for name, weight in rename_weights(oracle, rules).items()}
    table = weights.pop("encoder.layer.0.attention.relative_attention_bias.weight")
    query = "encoder.layer.0.attention.self.query.weight"
    weights[query] = weights[query] * math.sqrt(HEAD_SIZE)  # T5 does not scale its scores
    attention = model.encoder.layer[0].attention
    other_weights = {
        name: weight for name, weight in model.named_parameters() if not re.search(r"self|attention.*dense", name)
    }
    outputs: list[torch.Tensor] = []
    for module in (model.embeddings, attention.output.dense):
        module.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def bert(table: torch.Tensor) -> torch.Tensor:
        run_with_weights(model, other_weights | weights | {"position_scheme.0.table.weight": table}, ids)
        return outputs[-1]

    output = bert(table)
    with in_float64("t5"):
        expected = oracle(outputs[0])[0]
    assert_equal(oracle, expected, output)
    assert_different(oracle, expected, bert(table + T5_PERTURBATION))
