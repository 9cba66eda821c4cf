"""Whole models of transformers that are one of our architectures with a scheme: same weights, same numbers.

Our model runs on the oracle's own weights, rearranged on the way. So one comparison takes in the output and its
gradient to every weight of the oracle. All is float64, also where the oracle would narrow to float32 (`widened`).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.t5.modeling_t5 import T5Attention

from tests.support import tiny_models as tiny

LENGTH, WIDTH, HEADS = 14, 96, 6
HEAD_SIZE = WIDTH // HEADS  # a quarter of it turns at two frequencies: at one alone, theta would not matter
SIZES = {"vocab_size": tiny.VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS}
SIZES |= {"pad_token_id": tiny.PAD, "bos_token_id": 1, "eos_token_id": 2}
INNER = {"intermediate_size": 40}

T5_SIZES = {"d_kv": HEAD_SIZE, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
T5_SCHEME = {"type": "t5", "num_buckets": 8, "max_distance": 10}
NUDGE = 0.01 * torch.arange(8, dtype=torch.float64)[:, None]
"""What to add to such a table to see a difference: an equal bias everywhere would make none."""

SAME = 1e-9
"""Two float64 runs that take their sums in another order, through three layers and back."""
SEEN = 1e-4
"""What a control must differ by, in the output and in a gradient: far above any rounding."""

Weights = dict[str, torch.Tensor]


def filled(oracle: torch.nn.Module) -> Any:
    tiny.randomise(oracle.to(torch.float64)).eval()
    for module in oracle.modules():
        if hasattr(module, "inv_freq"):
            module.float()  # as a checkpoint has it: angles are float32 on either side
    return oracle


@contextlib.contextmanager
def widened(*names: str) -> Iterator[None]:
    """While these models run, their code finds float64 where it asks for float32.

    They take a norm or a softmax in float32 whatever their dtype, and its rounding would hide all that is smaller.
    Whole numbers become float32 as ever: our angles and T5's buckets are made of such.
    """
    stand_in = types.ModuleType("torch")
    stand_in.__dict__.update(vars(torch), float32=torch.float64)
    narrowed = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else narrowed(self))
        for name in names:
            patch.setattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), "torch", stand_in)
        yield


def renamed(oracle: torch.nn.Module, rules: dict[str, str]) -> Weights:
    weights = dict(oracle.named_parameters())
    for pattern, replacement in rules.items():
        weights = {re.sub(pattern, replacement, name): weight for name, weight in weights.items()}
    return weights


def run(model: Any, weights: Weights, *inputs: Any, **named: Any) -> torch.Tensor:
    """Our model on these weights instead of its own; biases and token types that the oracle lacks are 0."""
    model = model.to(torch.float64).eval()
    own = dict(model.named_parameters())
    absent = {name for name in own.keys() - weights.keys() if name.endswith("bias") or "token_type" in name}
    weights = weights | {name: torch.zeros_like(own[name]) for name in absent}
    assert weights.keys() == own.keys()
    return torch.func.functional_call(model, weights, inputs, named).last_hidden_state


def apart(oracle: torch.nn.Module, expected: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """The largest difference in the output, and in the gradient of a sum of it to any weight of the oracle."""
    weighting = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    learnt = [parameter for parameter in oracle.parameters() if parameter.requires_grad]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    theirs = torch.autograd.grad((expected * weighting).sum(), learnt, **options)
    ours = torch.autograd.grad((found * weighting).sum(), learnt, **options)
    gradients = [(mine - yours).abs().max().item() for mine, yours in zip(ours, theirs, strict=True)]
    return (found - expected).abs().max().item(), max(gradients)


def assert_same(oracle: Any, expected: torch.Tensor, found: torch.Tensor, within: float = SAME) -> None:
    output, gradient = apart(oracle, expected, found)
    assert output < within
    assert gradient < within


def assert_other(oracle: Any, expected: torch.Tensor, found: torch.Tensor) -> None:
    output, gradient = apart(oracle, expected, found)
    assert output > SEEN
    assert gradient > SEEN


def test_mpnet_is_bert_with_learned_and_shared_t5() -> None:
    sizes = {**SIZES, **INNER, "max_position_embeddings": 64}
    oracle = filled(transformers.MPNetModel(transformers.MPNetConfig(**sizes), add_pooling_layer=False))
    rules = {
        r"attention\.attn\.q\b": "attention.self.query",
        r"attention\.attn\.k\b": "attention.self.key",
        r"attention\.attn\.v\b": "attention.self.value",
        r"attention\.attn\.o\b": "attention.output.dense",
        r"attention\.LayerNorm": "attention.output.LayerNorm",
        r"encoder\.relative_attention_bias": "position_scheme.1.table",
    }
    weights, ids = renamed(oracle, rules), tiny.tokens(2, LENGTH)
    places = torch.arange(2, LENGTH + 2)[None].expand(2, -1)  # MPNet's first real place

    def bert(**changes: Any) -> torch.Tensor:
        scheme = ["learned", {"type": "t5", "num_buckets": 32, "max_distance": 128, **changes}]
        model = BertModel(BertConfig(**sizes, position_scheme=scheme), add_pooling_layer=False)
        return run(model, weights, ids, position_ids=places)

    expected = oracle(ids, position_ids=places).last_hidden_state
    assert_same(oracle, expected, bert())
    assert_other(oracle, expected, bert(max_distance=64))


def test_roformer_is_bert_with_interleaved_rope() -> None:
    """Our angles are float32 and RoFormer's table is rounded from float64 ones: so it gets GPT-J's, made like ours."""
    sizes = {**SIZES, **INNER}
    oracle = filled(transformers.RoFormerModel(transformers.RoFormerConfig(**sizes, max_position_embeddings=LENGTH)))
    oracle.encoder.embed_positions.weight.copy_(create_sinusoidal_positions(LENGTH, HEAD_SIZE))
    weights, ids = dict(oracle.named_parameters()), tiny.tokens(2, LENGTH)
    del weights["encoder.embed_positions.weight"]

    def bert(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "layout": "interleaved", **changes}
        return run(BertModel(BertConfig(**sizes, position_scheme=scheme), add_pooling_layer=False), weights, ids)

    expected = oracle(ids).last_hidden_state
    assert_same(oracle, expected, bert())
    assert_other(oracle, expected, bert(theta=9000.0))
    assert_other(oracle, expected, bert(layout="halves"))


def test_t5_attention_is_that_of_bert_with_t5() -> None:
    """BERT normalises after its attention and T5 before: so it is one attention of each, given the same states."""
    config = transformers.T5Config(**SIZES, **T5_SIZES, attn_implementation="eager")
    oracle, ids = filled(T5Attention(config, has_relative_attention_bias=True, layer_idx=0)), tiny.tokens(2, LENGTH)
    config = BertConfig(**SIZES | INNER | {"num_hidden_layers": 1}, position_scheme=T5_SCHEME)
    model = filled(BertModel(config, add_pooling_layer=False))
    rules = {r"^q\b": "self.query", r"^k\b": "self.key", r"^v\b": "self.value", r"^o\b": "output.dense"}
    weights = {f"encoder.layer.0.attention.{name}": weight for name, weight in renamed(oracle, rules).items()}
    table = weights.pop("encoder.layer.0.attention.relative_attention_bias.weight")
    query = "encoder.layer.0.attention.self.query.weight"
    weights[query] = weights[query] * math.sqrt(HEAD_SIZE)  # T5 does not scale its scores
    attention = model.encoder.layer[0].attention
    kept = {name: weight for name, weight in model.named_parameters() if not re.search(r"self|attention.*dense", name)}
    seen: list[torch.Tensor] = []
    for module in (model.embeddings, attention.output.dense):
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))

    def bert(table: torch.Tensor) -> torch.Tensor:
        run(model, kept | weights | {"position_scheme.0.table.weight": table}, ids)
        return seen[-1]

    found = bert(table)
    with widened("t5"):
        expected = oracle(seen[0])[0]
    assert_same(oracle, expected, found)
    assert_other(oracle, expected, bert(table + NUDGE))
