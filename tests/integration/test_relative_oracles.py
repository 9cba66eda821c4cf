"""Models of transformers whose terms depend on content and distance: DeBERTa, XLNet, Shaw's attention.

DeBERTa and XLNet equal BERT with a scheme. Where transformers only has an attention layer with the scheme, the oracle
is a stock model that uses that layer, without positions of its own.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

from hf_posenc.schemes.deberta import log_buckets
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.model_oracles import (
    HEADS,
    LENGTH,
    MLP_SIZES,
    SIZES,
    WIDTH,
    Weights,
    assert_different,
    assert_equal,
    in_float64,
    randomised_oracle,
    rename_weights,
    run_with_weights,
)
from tests.support.sampling import combinations

BOTH = ["c2p", "p2c"]
HEADS_BY_TERMS = {1: 12, 2: 8}
"""Heads by number of terms: DeBERTa computes sqrt(d (1 + terms)) in float32, which is exactly 4 or 6 with these."""
SCHEME_PREFIX = {
    "bert": "encoder.layer.{}.attention.self.position_scheme.0.",
    "gpt2": "h.{}.attn.position_scheme.0.",
    "llama": "layers.{}.self_attn.position_scheme.0.",
}
"""Prefix of a scheme's parameters in a layer."""


def visible(kind: str, length: int) -> torch.Tensor:
    """The mask of two rows: "whole"; "padded", one on the right and one on the left; or with "gaps" in both."""
    mask = torch.ones(2, length, dtype=torch.long)
    if kind == "padded":
        mask[0, -3:], mask[1, :5] = 0, 0
    elif kind == "gaps":
        mask[0, 3:6], mask[1, 1:10:4] = 0, 0
    return mask


def run_visible(model: Any, weights: Weights, kind: str, length: int = LENGTH) -> torch.Tensor:
    """Outputs at visible tokens. With gaps, our model gets only the visible tokens, with their position_ids."""
    ids, mask = tiny.tokens(2, length), visible(kind, length)
    if kind != "gaps":
        return run_with_weights(model, weights, ids, mask)[mask.bool()]
    positions = mask.nonzero()[:, 1].view(2, -1)
    return run_with_weights(model, weights, ids.gather(1, positions), position_ids=positions).flatten(0, 1)


def deberta(kind: Any, terms: list[str], **settings: Any) -> Any:
    sizes = SIZES | MLP_SIZES | {"num_attention_heads": HEADS_BY_TERMS[len(terms)], "max_position_embeddings": 64}
    settings |= {"relative_attention": True, "position_biased_input": False, "pos_att_type": "|".join(terms)}
    return randomised_oracle(kind(kind.config_class(**sizes, **settings)))


def assert_bert_equals_deberta(
    oracle: Any, inputs: tuple[str, int], output: torch.Tensor, weights: Weights, scale: Any, gain: Any, **scheme: Any
) -> None:
    """Our scheme also learns two numbers per head; `scale` and `gain` multiply their values in the paper."""
    expected, heads = output[visible(*inputs).bool()], HEADS_BY_TERMS[len(scheme["terms"])]
    table, in_paper = weights["position_scheme.0.table"], (1 + len(scheme["terms"])) ** -0.5

    def bert(scale: Any = scale, gain: Any = gain, table: Any = table, **changes: Any) -> torch.Tensor:
        changed = {"type": "deberta", "init": "paper", **scheme, **changes}
        sizes = SIZES | MLP_SIZES | {"num_attention_heads": heads, "layer_norm_eps": 1e-7}
        model = BertModel(BertConfig(**sizes, position_scheme=changed), add_pooling_layer=False)
        scheme_weights = {"position_scheme.0.table": table}
        for layer in range(SIZES["num_hidden_layers"]):
            # `content_change` is stored minus 1, so that 0 is neutral.
            for name, paper, factor, offset in (
                ("content_change", in_paper, scale, 1),
                ("position_gain", 1.0, gain, 0),
            ):
                parameter = SCHEME_PREFIX["bert"].format(layer) + name
                values = torch.full((heads,), paper, dtype=torch.float64)
                torch.testing.assert_close(model.get_parameter(parameter).detach() + offset, values.float())
                scheme_weights[parameter] = values * factor - offset
        return run_visible(model, weights | scheme_weights, *inputs)

    assert_equal(oracle, expected, bert())
    assert_different(oracle, expected, bert(scale=0.9 * scale))
    assert_different(oracle, expected, bert(gain=0.9 * gain))
    assert_different(oracle, expected, bert(table=table.flip(0)))
    if scheme["buckets"]:
        assert_different(oracle, expected, bert(max_distance=scheme["max_distance"] + 4))


DEBERTA_V2_SETTINGS = [
    (BOTH, 8, True, "layer_norm"),
    (["p2c"], 8, False, "layer_norm"),
    (BOTH, 0, True, "layer_norm"),
    (["c2p"], 0, True, "layer_norm"),
    (["p2c"], 0, True, None),
    (BOTH, 0, False, "layer_norm"),
    (["c2p"], 0, False, None),
]


@pytest.mark.parametrize(
    ("terms", "buckets", "share", "norm", "kind"),
    [
        pytest.param(*settings, kind, marks=[] if (row + column) % 3 == 0 else [pytest.mark.slow])
        for row, settings in enumerate(DEBERTA_V2_SETTINGS)
        for column, kind in enumerate(("whole", "padded", "gaps"))
    ],
)
def test_deberta_v2_equals_bert_with_deberta(
    terms: list[str], buckets: int, share: bool, norm: str | None, kind: str
) -> None:
    """Distances exceed the table on both sides; with buckets, they first reach the logarithmic ones.

    DeBERTa's projection of position keys has a bias and ours does not: it adds the same to all scores of a query, which
    softmax cancels.
    """
    limit, length = (20, 44) if buckets else (6, LENGTH)
    settings = {"position_buckets": buckets or -1, "max_relative_positions": limit, "share_att_key": share}
    oracle = deberta(transformers.DebertaV2Model, terms, **settings, norm_rel_ebd=norm or "none")
    rules = {
        r"^encoder\.rel_embeddings\.weight": "position_scheme.0.table",
        r"^encoder\.LayerNorm\.": "position_scheme.0.norm.",
        r"self\.(query|key|value)_proj": r"self.\1",
        r"self\.pos_(query|key)_proj\.weight": r"self.position_scheme.0.\1_projection",
        r"self\.pos_query_proj\.bias": "self.position_scheme.0.query_bias",
    }
    weights = {
        name: weight for name, weight in rename_weights(oracle, rules).items() if "pos_key_proj.bias" not in name
    }
    output = oracle(tiny.tokens(2, length), attention_mask=visible(kind, length)).last_hidden_state
    scheme = {"terms": terms, "max_distance": limit, "buckets": buckets, "share_projections": share, "norm": norm}
    assert_bert_equals_deberta(oracle, (kind, length), output, weights, 1.0, 1.0, **scheme)


@combinations(limit=[6, 20], terms=[BOTH, ["c2p"], ["p2c"]])
def test_deberta_v1_equals_bert_with_separate_projections(terms: list[str], limit: int) -> None:
    """Positions have separate projections here, so DeBERTa's matrices can absorb our two numbers per head.

    Scaling the keys by `scale` scales c2c and p2c; dividing position queries by it undoes the latter. So the gradients
    of these two numbers, which DeBERTa does not have, are compared as well.
    """
    oracle, heads = deberta(transformers.DebertaModel, terms, max_relative_positions=limit), HEADS_BY_TERMS[len(terms)]
    rules = {
        r"^encoder\.rel_embeddings\.weight": "position_scheme.0.table",
        r"self\.pos_proj\.weight": "self.position_scheme.0.key_projection",
        r"self\.pos_q_proj\.weight": "self.position_scheme.0.query_projection",
        r"self\.pos_q_proj\.bias": "self.position_scheme.0.query_bias",
        r"self\.q_bias": "self.query.bias",
        r"self\.v_bias": "self.value.bias",
    }
    weights = rename_weights(oracle, rules)
    for fused in [name for name in weights if name.endswith("in_proj.weight")]:
        parts = weights.pop(fused).unflatten(0, (heads, 3, -1)).unbind(1)
        for name, weight in zip(("query", "key", "value"), parts, strict=True):
            weights[fused.replace("in_proj", name)] = weight.flatten(0, 1)
    ones, numbers = torch.ones(heads, dtype=torch.float64), torch.linspace(0.6, 1.5, heads, dtype=torch.float64)
    oracle.scale, oracle.gain = torch.nn.Parameter(numbers), torch.nn.Parameter(numbers.flip(0))
    factors = {"in_proj": torch.stack([ones, oracle.scale, ones], 1).flatten(), "pos_proj": oracle.gain}
    factors |= {"pos_q_proj": oracle.gain / oracle.scale}
    scaled = dict(oracle.named_parameters())
    for name, weight in scaled.items():
        for matrix, factor in factors.items():
            if f".{matrix}." in name:
                by_row = factor.repeat_interleave(len(weight) // len(factor))
                scaled[name] = torch.einsum("r...,r->r...", weight, by_row)
    with in_float64("deberta"):
        inputs = (tiny.tokens(2, LENGTH), visible("padded", LENGTH))
        output = torch.func.functional_call(oracle, scaled, inputs).last_hidden_state
    scheme = {"terms": terms, "max_distance": limit, "buckets": 0, "share_projections": False, "norm": None}
    assert_bert_equals_deberta(oracle, ("padded", LENGTH), output, weights, oracle.scale, oracle.gain, **scheme)


@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(4, 5), (6, 24), (7, 11), (8, 20), (32, 128), (64, 1500), (256, 512), (256, 1000), (512, 2048)],
)
def test_log_buckets_equal_deberta_at_every_distance(buckets: int, max_distance: int) -> None:
    relative = torch.arange(-3000, 3001)
    expected = make_log_bucket_position(relative, buckets, max_distance).long()
    assert torch.equal(log_buckets(relative, buckets, max_distance), expected)
    assert not torch.equal(log_buckets(relative, buckets, max_distance + max_distance // 4), expected)
    assert expected.max() >= buckets  # the table has no such row, so this is clamped


def xlnet(width: int, heads: int, causal: bool, shared: bool) -> Any:
    sizes = {"d_model": width, "n_head": heads, "n_layer": 3, "d_inner": 40, "vocab_size": tiny.VOCABULARY}
    model = transformers.XLNetModel(transformers.XLNetConfig(**sizes, attn_type="uni" if causal else "bi"))
    for layer in model.layer if shared else []:
        layer.rel_attn.r_w_bias = model.layer[0].rel_attn.r_w_bias
        layer.rel_attn.r_r_bias = model.layer[0].rel_attn.r_r_bias
    return randomised_oracle(model)


def scheme_weights(model: Any, architecture: str, shared: bool, control: str = "") -> Weights:
    """XLNet's parameters under our names. The controls swap u and v, or mirror distances by the sign of the sines."""
    weights: Weights = {}
    for number, layer in enumerate(model.layer):
        prefix, attention = SCHEME_PREFIX[architecture].format(number), layer.rel_attn
        signs = torch.ones(attention.d_model, dtype=torch.float64)
        signs[: attention.d_model // 2] = -1 if control == "mirrored" else 1
        weights[prefix + "key_projection"] = attention.r.flatten(1).T * signs
        prefix = "position_scheme.0.biases." if shared else prefix
        u, v = attention.r_w_bias, attention.r_r_bias
        u, v = (v, u) if control == "swapped" else (u, v)
        weights |= {prefix + "u": u, prefix + "v": v}
    return weights


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_stock_models_with_xlnet_attention_equal_transformer_xl(
    architecture: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key heads of LLaMA are repeated per group. XLNet's sinusoids are computed in float64, like ours."""
    stock, ids = oracles.stock_without_positions(architecture).base_model, tiny.tokens(2, LENGTH)
    relative = xlnet(tiny.WIDTH, tiny.HEADS, architecture != "bert", shared)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        sinusoids = relative.relative_positional_encoding(LENGTH, LENGTH, bsz=2)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        xlnet_attention = relative.layer[module.layer_idx].rel_attn
        key, value = (states.repeat_interleave(tiny.HEADS // states.shape[1], dim=1) for states in (key, value))
        time_first = [states.permute(2, 0, 1, 3) for states in (query, key, value)]
        rows = torch.einsum("ibh,hnd->ibnd", sinusoids, xlnet_attention.r)
        hidden = (mask < 0).double().permute(2, 3, 0, 1)
        return xlnet_attention.rel_attn_core(*time_first, rows, attn_mask=hidden).transpose(0, 1), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "oracle", attention)
    stock.config._attn_implementation = "oracle"
    if architecture == "llama":
        stock.rotary_emb.float()  # angles of 0
    for name, weight in stock.named_parameters():
        weight.requires_grad_(not re.search("wpe|position_embeddings", name))
    common = {name: weight for name, weight in stock.named_parameters() if weight.requires_grad}
    both = torch.nn.ModuleList([stock, relative])

    def ours(control: str = "") -> torch.Tensor:
        model = tiny.model(architecture, {"type": "transformer_xl", "shared_bias": shared})
        return run_with_weights(model.base_model, common | scheme_weights(relative, architecture, shared, control), ids)

    with in_float64("llama"):
        mask = oracles.causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).last_hidden_state
        assert_equal(both, expected, ours())
        assert_different(both, expected, ours("swapped"))
        assert_different(both, expected, ours("mirrored"))


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize(("causal", "kind"), [(False, "padded"), (False, "gaps"), (True, "whole")])
def test_xlnet_equals_bert_with_transformer_xl(causal: bool, kind: str, shared: bool) -> None:
    """BERT normalizes its embeddings, so XLNet gets normalized ones. Without token types it ignores segments.

    A causal XLNet gets no mask: it would try to add the two in place, with the wrong shape.
    """
    oracle, mask = xlnet(WIDTH, HEADS, causal, shared), visible(kind, LENGTH)
    words = torch.nn.functional.layer_norm(oracle.word_embedding(tiny.tokens(2, LENGTH)), (WIDTH,), eps=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # sinusoids in float64, like ours
        inputs = {"inputs_embeds": words, "attention_mask": None if causal else mask, "use_mems": False}
        expected = oracle(**inputs).last_hidden_state[mask.bool()]
    rules = {
        r"^word_embedding\b": "embeddings.word_embeddings",
        r"^layer": "encoder.layer",
        r"rel_attn\.layer_norm": "attention.output.LayerNorm",
        r"ff\.layer_norm": "output.LayerNorm",
        r"ff\.layer_1": "intermediate.dense",
        r"ff\.layer_2": "output.dense",
    }
    weights = rename_weights(oracle, rules)
    weights = {name: weight for name, weight in weights.items() if not re.search("rel_attn|mask_emb", name)}
    weights["embeddings.LayerNorm.weight"] = torch.ones(WIDTH, dtype=torch.float64)
    for number, layer in enumerate(oracle.layer):
        prefix, attention = f"encoder.layer.{number}.attention.", layer.rel_attn
        for name, weight in {"query": attention.q, "key": attention.k, "value": attention.v}.items():
            weights[f"{prefix}self.{name}.weight"] = weight.flatten(1).T
        weights[f"{prefix}output.dense.weight"] = attention.o.flatten(1)

    def bert(control: str = "") -> torch.Tensor:
        changes = {"is_decoder": causal, "position_scheme": {"type": "transformer_xl", "shared_bias": shared}}
        model = BertModel(BertConfig(**SIZES, **MLP_SIZES, **changes), add_pooling_layer=False)
        return run_visible(model, weights | scheme_weights(oracle, "bert", shared, control), kind)

    assert_equal(oracle, expected, bert())
    assert_different(oracle, expected, bert("swapped"))
    assert_different(oracle, expected, bert("mirrored"))


class AttentionForBert(Wav2Vec2BertSelfAttention):
    """Ignores the additional arguments that BERT passes."""

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(states)[:2]


@pytest.mark.parametrize("limit", [1, 4, LENGTH])
def test_bert_with_wav2vec2_bert_attention_equals_shaw(limit: int) -> None:
    """Its table is ordered by key minus query, ours by query minus key. It includes BERT's `output.dense`."""
    settings = {"position_embeddings_type": "relative_key", "attn_implementation": "eager"}
    settings |= {"left_max_position_embeddings": limit, "right_max_position_embeddings": limit}
    config = transformers.Wav2Vec2BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, **settings)
    oracle, ids = BertModel(BertConfig(**SIZES, **MLP_SIZES), add_pooling_layer=False), tiny.tokens(2, LENGTH)
    for layer in oracle.encoder.layer:
        layer.attention.self, layer.attention.output.dense = AttentionForBert(config), torch.nn.Identity()
    randomised_oracle(oracle).embeddings.position_embeddings.requires_grad_(False).weight.zero_()
    rules = {rf"self\.linear_{name[0]}\b": f"self.{name}" for name in ("query", "key", "value")}
    rules |= {r"self\.linear_out": "output.dense", r"self\.distance_embedding\.weight": "self.position_scheme.0.keys"}
    renamed = rename_weights(oracle, rules)
    weights = {name: weight for name, weight in renamed.items() if "position_embeddings" not in name}
    flipped = {name: weight.flip(0) for name, weight in weights.items() if "position_scheme" in name}

    def bert(tables: Weights) -> torch.Tensor:
        scheme = {"type": "shaw", "values": False, "max_distance": limit}
        model = BertModel(BertConfig(**SIZES, **MLP_SIZES, position_scheme=scheme), add_pooling_layer=False)
        return run_with_weights(model, weights | tables, ids)

    expected = oracle(ids).last_hidden_state
    assert_equal(oracle, expected, bert(flipped))
    assert_different(oracle, expected, bert({}))
    assert_different(oracle, expected, bert({name: 0.9 * table for name, table in flipped.items()}))
