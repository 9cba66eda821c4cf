"""More whole models, compared as in test_whole_models.py: schemes whose terms are of content and distance.

DeBERTa is BERT with such a scheme, and so is XLNet. Where transformers has but an attention with one, the oracle is
a stock model that attends by it, its own positions silenced.
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
from tests.integration.test_encoder_oracles import (
    HEADS,
    INNER,
    LENGTH,
    SIZES,
    WIDTH,
    Weights,
    assert_other,
    assert_same,
    filled,
    renamed,
    run,
    widened,
)
from tests.support import oracles
from tests.support import tiny_models as tiny

BOTH = ["c2p", "p2c"]
EXACT = {1: 12, 2: 8}
"""Heads by number of terms: DeBERTa takes sqrt(d (1 + terms)) in float32, and here that is 4 or 6, with no rounding."""
PARTS = {
    "bert": "encoder.layer.{}.attention.self.position_scheme.0.",
    "gpt2": "h.{}.attn.position_scheme.0.",
    "llama": "layers.{}.self_attn.position_scheme.0.",
}
"""Where a layer of ours keeps its part of a scheme."""


def visible(kind: str, length: int) -> torch.Tensor:
    """The mask of two rows: "whole", or one "padded" on the right and one on the left, or both with "gaps"."""
    mask = torch.ones(2, length, dtype=torch.long)
    if kind == "padded":
        mask[0, -3:], mask[1, :5] = 0, 0
    elif kind == "gaps":
        mask[0, 3:6], mask[1, 1:10:4] = 0, 0
    return mask


def run_visible(model: Any, weights: Weights, kind: str, length: int = LENGTH) -> torch.Tensor:
    """Our model, which is not given tokens in gaps at all but the places of the others."""
    ids, mask = tiny.tokens(2, length), visible(kind, length)
    if kind != "gaps":
        return run(model, weights, ids, mask)[mask.bool()]
    places = mask.nonzero()[:, 1].view(2, -1)
    return run(model, weights, ids.gather(1, places), position_ids=places).flatten(0, 1)


def deberta(kind: Any, terms: list[str], **settings: Any) -> Any:
    sizes = SIZES | INNER | {"num_attention_heads": EXACT[len(terms)], "max_position_embeddings": 64}
    settings |= {"relative_attention": True, "position_biased_input": False, "pos_att_type": "|".join(terms)}
    return filled(kind(kind.config_class(**sizes, **settings)))


def assert_bert_is_deberta(
    oracle: Any, inputs: tuple[str, int], output: torch.Tensor, weights: Weights, scale: Any, gain: Any, **scheme: Any
) -> None:
    """Ours has two numbers a head besides: `scale` and `gain` are what they are times the paper's."""
    expected, heads = output[visible(*inputs).bool()], EXACT[len(scheme["terms"])]
    table, papers = weights["position_scheme.0.table"], (1 + len(scheme["terms"])) ** -0.5

    def bert(scale: Any = scale, gain: Any = gain, table: Any = table, **changes: Any) -> torch.Tensor:
        changed = {"type": "deberta", "init": "paper", **scheme, **changes}
        sizes = SIZES | INNER | {"num_attention_heads": heads, "layer_norm_eps": 1e-7}
        model = BertModel(BertConfig(**sizes, position_scheme=changed), add_pooling_layer=False)
        own = {"position_scheme.0.table": table}
        for layer in range(SIZES["num_hidden_layers"]):
            for name, start, factor, less in (("content_change", papers, scale, 1), ("position_gain", 1.0, gain, 0)):
                place, values = PARTS["bert"].format(layer) + name, torch.full((heads,), start, dtype=torch.float64)
                by_init = model.get_parameter(place).detach() + less
                torch.testing.assert_close(by_init, values.float())  # by init = "paper"
                own[place] = values * factor - less
        return run_visible(model, weights | own, *inputs)

    assert_same(oracle, expected, bert())
    assert_other(oracle, expected, bert(scale=0.9 * scale))
    assert_other(oracle, expected, bert(gain=0.9 * gain))
    assert_other(oracle, expected, bert(table=table.flip(0)))
    if scheme["buckets"]:
        assert_other(oracle, expected, bert(max_distance=scheme["max_distance"] + 4))


@pytest.mark.parametrize("kind", ["whole", "padded", "gaps"])
@pytest.mark.parametrize(
    ("terms", "buckets", "share", "norm"),
    [
        (BOTH, 8, True, "layer_norm"),
        (["p2c"], 8, False, "layer_norm"),
        (BOTH, 0, True, "layer_norm"),
        (["c2p"], 0, True, "layer_norm"),
        (["p2c"], 0, True, None),
        (BOTH, 0, False, "layer_norm"),
        (["c2p"], 0, False, None),
    ],
)
def test_deberta_v2_is_bert_with_deberta(
    terms: list[str], buckets: int, share: bool, norm: str | None, kind: str
) -> None:
    """Distances go past the last row of the table on both sides; with buckets, past those that widen first.

    DeBERTa's own projection of position keys has a bias and ours has none: it would add the same to all of a query's
    scores, which their softmax takes away again.
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
    weights = {name: weight for name, weight in renamed(oracle, rules).items() if "pos_key_proj.bias" not in name}
    output = oracle(tiny.tokens(2, length), attention_mask=visible(kind, length)).last_hidden_state
    scheme = {"terms": terms, "max_distance": limit, "buckets": buckets, "share_projections": share, "norm": norm}
    assert_bert_is_deberta(oracle, (kind, length), output, weights, 1.0, 1.0, **scheme)


@pytest.mark.parametrize("limit", [6, 20], ids=["past-table", "within-table"])
@pytest.mark.parametrize("terms", [BOTH, ["c2p"], ["p2c"]], ids="+".join)
def test_deberta_v1_is_bert_with_deberta_and_own_projections(terms: list[str], limit: int) -> None:
    """Positions have projections of their own here, so DeBERTa's matrices can hold our two numbers a head.

    Keys times `scale` make c2c larger, and p2c too, which position queries over `scale` undo. So these two, which
    DeBERTa does not learn, are also compared by their gradients.
    """
    oracle, heads = deberta(transformers.DebertaModel, terms, max_relative_positions=limit), EXACT[len(terms)]
    rules = {
        r"^encoder\.rel_embeddings\.weight": "position_scheme.0.table",
        r"self\.pos_proj\.weight": "self.position_scheme.0.key_projection",
        r"self\.pos_q_proj\.weight": "self.position_scheme.0.query_projection",
        r"self\.pos_q_proj\.bias": "self.position_scheme.0.query_bias",
        r"self\.q_bias": "self.query.bias",
        r"self\.v_bias": "self.value.bias",
    }
    weights = renamed(oracle, rules)
    for fused in [name for name in weights if name.endswith("in_proj.weight")]:
        parts = weights.pop(fused).unflatten(0, (heads, 3, -1)).unbind(1)
        for name, part in zip(("query", "key", "value"), parts, strict=True):
            weights[fused.replace("in_proj", name)] = part.flatten(0, 1)
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
    with widened("deberta"):
        inputs = (tiny.tokens(2, LENGTH), visible("padded", LENGTH))
        output = torch.func.functional_call(oracle, scaled, inputs).last_hidden_state
    scheme = {"terms": terms, "max_distance": limit, "buckets": 0, "share_projections": False, "norm": None}
    assert_bert_is_deberta(oracle, ("padded", LENGTH), output, weights, oracle.scale, oracle.gain, **scheme)


@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(4, 5), (6, 24), (7, 11), (8, 20), (32, 128), (64, 1500), (256, 512), (256, 1000), (512, 2048)],
)
def test_log_buckets_are_debertas_at_every_distance(buckets: int, max_distance: int) -> None:
    relative = torch.arange(-3000, 3001)
    expected = make_log_bucket_position(relative, buckets, max_distance).long()
    assert torch.equal(log_buckets(relative, buckets, max_distance), expected)
    assert not torch.equal(log_buckets(relative, buckets, max_distance + max_distance // 4), expected)
    assert expected.max() >= buckets  # the table has no row for it: there the clamp acts


def xlnet(width: int, heads: int, causal: bool, shared: bool) -> Any:
    sizes = {"d_model": width, "n_head": heads, "n_layer": 3, "d_inner": 40, "vocab_size": tiny.VOCABULARY}
    model = transformers.XLNetModel(transformers.XLNetConfig(**sizes, attn_type="uni" if causal else "bi"))
    for layer in model.layer if shared else []:
        layer.rel_attn.r_w_bias = model.layer[0].rel_attn.r_w_bias
        layer.rel_attn.r_r_bias = model.layer[0].rel_attn.r_r_bias
    return filled(model)


def scheme_weights(model: Any, architecture: str, shared: bool, control: str = "") -> Weights:
    """Ours from XLNet's; wrong ones if asked: u for v, or distances the other way, as sines of other sign are."""
    weights: Weights = {}
    for number, layer in enumerate(model.layer):
        part, own = PARTS[architecture].format(number), layer.rel_attn
        signs = torch.ones(own.d_model, dtype=torch.float64)
        signs[: own.d_model // 2] = -1 if control == "mirrored" else 1
        weights[part + "key_projection"] = own.r.flatten(1).T * signs
        part = "position_scheme.0.biases." if shared else part
        u, v = (own.r_r_bias, own.r_w_bias) if control == "exchanged" else (own.r_w_bias, own.r_r_bias)
        weights |= {part + "u": u, part + "v": v}
    return weights


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_stock_models_with_xlnets_attention_have_transformer_xl(
    architecture: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaMA's key heads are repeated for their group. XLNet's sinusoids are made to be float64, as ours are."""
    stock, ids = oracles.silent_stock(architecture).base_model, tiny.tokens(2, LENGTH)
    relative = xlnet(tiny.WIDTH, tiny.HEADS, architecture != "bert", shared)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        sinusoids = relative.relative_positional_encoding(LENGTH, LENGTH, bsz=2)

    def attention(attending: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        own = relative.layer[attending.layer_idx].rel_attn
        key, value = (states.repeat_interleave(tiny.HEADS // states.shape[1], dim=1) for states in (key, value))
        by_place = [states.permute(2, 0, 1, 3) for states in (query, key, value)]
        rows = torch.einsum("ibh,hnd->ibnd", sinusoids, own.r)
        hidden = (mask < 0).double().permute(2, 3, 0, 1)
        return own.rel_attn_core(*by_place, rows, attn_mask=hidden).transpose(0, 1), None

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
        return run(model.base_model, common | scheme_weights(relative, architecture, shared, control), ids)

    with widened("llama"):
        mask = oracles.causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).last_hidden_state
        assert_same(both, expected, ours())
        assert_other(both, expected, ours("exchanged"))
        assert_other(both, expected, ours("mirrored"))


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize(("causal", "kind"), [(False, "padded"), (False, "gaps"), (True, "whole")])
def test_xlnet_is_bert_with_transformer_xl(causal: bool, kind: str, shared: bool) -> None:
    """BERT normalises its embeddings: XLNet is given them so. Without token types it leaves its segments out.

    XLNet as a decoder takes no mask: adding the two, it broadcasts in place.
    """
    oracle, mask = xlnet(WIDTH, HEADS, causal, shared), visible(kind, LENGTH)
    words = torch.nn.functional.layer_norm(oracle.word_embedding(tiny.tokens(2, LENGTH)), (WIDTH,), eps=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # its sinusoids, as ours are
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
    weights = renamed(oracle, rules)
    weights = {name: weight for name, weight in weights.items() if not re.search("rel_attn|mask_emb", name)}
    weights["embeddings.LayerNorm.weight"] = torch.ones(WIDTH, dtype=torch.float64)
    for number, layer in enumerate(oracle.layer):
        place, own = f"encoder.layer.{number}.attention.", layer.rel_attn
        for name, weight in {"query": own.q, "key": own.k, "value": own.v}.items():
            weights[f"{place}self.{name}.weight"] = weight.flatten(1).T
        weights[f"{place}output.dense.weight"] = own.o.flatten(1)

    def bert(control: str = "") -> torch.Tensor:
        changes = {"is_decoder": causal, "position_scheme": {"type": "transformer_xl", "shared_bias": shared}}
        model = BertModel(BertConfig(**SIZES, **INNER, **changes), add_pooling_layer=False)
        return run_visible(model, weights | scheme_weights(oracle, "bert", shared, control), kind)

    assert_same(oracle, expected, bert())
    assert_other(oracle, expected, bert("exchanged"))
    assert_other(oracle, expected, bert("mirrored"))


class CalledByBert(Wav2Vec2BertSelfAttention):
    """With the arguments that BERT has for it left out."""

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(states)[:2]


@pytest.mark.parametrize("limit", [1, 4, LENGTH])
def test_bert_with_wav2vec2_berts_attention_has_shaw(limit: int) -> None:
    """Its rows are by key minus query, ours by query minus key. BERT's `output.dense` is in there too."""
    settings = {"position_embeddings_type": "relative_key", "attn_implementation": "eager"}
    settings |= {"left_max_position_embeddings": limit, "right_max_position_embeddings": limit}
    config = transformers.Wav2Vec2BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, **settings)
    oracle, ids = BertModel(BertConfig(**SIZES, **INNER), add_pooling_layer=False), tiny.tokens(2, LENGTH)
    for layer in oracle.encoder.layer:
        layer.attention.self, layer.attention.output.dense = CalledByBert(config), torch.nn.Identity()
    filled(oracle).embeddings.position_embeddings.requires_grad_(False).weight.zero_()
    rules = {rf"self\.linear_{name[0]}\b": f"self.{name}" for name in ("query", "key", "value")}
    rules |= {r"self\.linear_out": "output.dense", r"self\.distance_embedding\.weight": "self.position_scheme.0.keys"}
    unturned = {name: weight for name, weight in renamed(oracle, rules).items() if "position_embeddings" not in name}
    turned = {name: weight.flip(0) for name, weight in unturned.items() if "position_scheme" in name}

    def bert(tables: Weights) -> torch.Tensor:
        scheme = {"type": "shaw", "values": False, "max_distance": limit}
        model = BertModel(BertConfig(**SIZES, **INNER, position_scheme=scheme), add_pooling_layer=False)
        return run(model, unturned | tables, ids)

    expected = oracle(ids).last_hidden_state
    assert_same(oracle, expected, bert(turned))
    assert_other(oracle, expected, bert({}))
    assert_other(oracle, expected, bert({name: 0.9 * table for name, table in turned.items()}))
