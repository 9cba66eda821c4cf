"""Teachers, text of a model's own, what is trained, and warm starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_posenc
from hf_posenc.schedule import with_handover
from hf_posenc.training.centring import centre_tables
from hf_posenc.training.fitting import fit
from hf_posenc.training.own_text import own_text
from hf_posenc.training.parameters import train_positions_only
from hf_posenc.training.rates import learns_faster, parameter_groups
from hf_posenc.training.teacher import Teacher, Weights, layers_of, recorded
from tests.support import oracles
from tests.support import tiny_models as tiny

ARCHITECTURES = ["bert", "gpt2", "llama"]
LEARNED_ALIBI = {"type": "alibi", "learned": True}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_teacher_finds_nothing_wrong_with_itself(architecture: str) -> None:
    ids = tiny.tokens()
    teacher = Teacher(tiny.model(architecture))
    lesson = teacher.look_at({"input_ids": ids})
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    same = tiny.model(architecture)
    with recorded(layers_of(same)) as states:
        logits = same(ids).logits
    assert len(states) == tiny.LAYERS + 1
    assert lesson.divergence(logits).item() == pytest.approx(0, abs=1e-6)
    assert lesson.distance(states[1:]).item() == pytest.approx(0, abs=1e-12)
    other = tiny.model(architecture, "none")
    with recorded(layers_of(other)) as states:
        logits = other(ids).logits
    assert lesson.logits_BNV is not None
    known, found = lesson.logits_BNV.log_softmax(-1), logits.log_softmax(-1)
    expected = nn.functional.kl_div(found.flatten(0, 1), known.flatten(0, 1), log_target=True, reduction="batchmean")
    torch.testing.assert_close(lesson.divergence(logits).double(), expected, rtol=1e-4, atol=0)
    assert lesson.distance(states[1:]).item() > 1e-3


def test_padding_counts_for_nothing() -> None:
    ids = tiny.tokens(2, 8)
    lesson = Teacher(tiny.model("gpt2")).look_at({"input_ids": ids})
    other = tiny.model("gpt2", "none")
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with recorded(layers_of(other)) as states:
        logits = other(ids).logits
    changed = logits.detach().clone()
    changed[1, 4:] += 10 * torch.randn_like(changed[1, 4:])
    assert lesson.divergence(logits, mask).item() == lesson.divergence(changed, mask).item()
    assert lesson.divergence(logits).item() != lesson.divergence(changed).item()
    worse = [state.detach().clone() for state in states[1:]]
    for state in worse:
        state[1, 4:] += 1
    assert lesson.distance(worse, mask).item() == lesson.distance(states[1:], mask).item()


def test_own_text_is_what_the_model_samples() -> None:
    model = tiny.model("gpt2", dtype=torch.float32).train()
    first = own_text(model, 5, 12, rows_at_a_time=2, progress=False)
    assert first.shape == (5, 12)
    assert (first[:, 0] == model.config.bos_token_id).all()
    assert model.training
    assert torch.equal(first, own_text(model, 5, 12, rows_at_a_time=2, progress=False))
    assert not torch.equal(first, own_text(model, 5, 12, rows_at_a_time=2, seed=1, progress=False))
    with torch.no_grad():  # what it thinks likely, it wrote more often than chance has it
        chance = torch.randint(3, tiny.VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(0))
        written = own_text(model, 64, 12, progress=False)
        assert model(written, labels=written).loss < model(chance, labels=chance).loss
    model.generation_config.update(repetition_penalty=5.0, min_p=0.5, num_beams=2, suppress_tokens=[7])
    assert torch.equal(first, own_text(model, 5, 12, rows_at_a_time=2, progress=False))
    assert model.generation_config.num_beams == 2
    with pytest.raises(ValueError, match="ask for less"):
        own_text(model, 1, tiny.TRAINED_LENGTH + 1)
    model.config.bos_token_id, model.config.eos_token_id = None, [2, 3]
    assert (own_text(model, 2, 4, progress=False)[:, 0] == 2).all()
    model.config.bos_token_id = model.config.eos_token_id = None
    with pytest.raises(ValueError, match="data of your own"):
        own_text(model, 1, 4)


def test_positions_only() -> None:
    model = tiny.model("gpt2", ["learned", "t5"])
    expected = 32 * tiny.HEADS
    assert train_positions_only(model) == expected
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected
    with pytest.raises(ValueError, match="no parameters"):
        train_positions_only(tiny.model("gpt2", "alibi"))


def test_groups_have_their_own_rate_and_no_decay_on_positions() -> None:
    model = tiny.model("llama", ["rope", "t5"])
    rest, own = parameter_groups(model, 1e-3, 1e-2, weight_decay=0.1)
    assert (rest["lr"], rest["weight_decay"]) == (1e-3, 0.1)
    assert (own["lr"], own["weight_decay"]) == (1e-2, 0.0)
    assert len(own["params"]) == 1
    assert len(rest["params"]) == len(list(model.parameters())) - 1
    torch.optim.AdamW([rest, own])
    assert len(parameter_groups(tiny.model("llama", "none"), 1e-3)) == 1


def handing(architecture: str, scheme: Any) -> Any:
    """Schemes as they begin, in a model whose attention is sharp enough for positions to matter."""
    stock = tiny.model(architecture, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if any(word in name for word in ("q_proj.weight", "k_proj.weight", "c_attn.weight", "query.weight")):
                parameter.mul_(3)
    return hf_posenc.retrofit(stock, with_handover(scheme, 4))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "scheme", ["t5", "kerple", "shaw", "transformer_xl", "deberta", {"type": "alibi", "learned": True}]
)
def test_a_fitted_scheme_attends_more_like_the_old_one(architecture: str, scheme: Any) -> None:
    model, ids = handing(architecture, scheme), tiny.tokens(6, 24)
    with torch.no_grad():
        stock = model(ids).logits
        rest = {name: p.clone() for name, p in model.named_parameters() if "position_scheme" not in name}
    found = fit(model, ids, steps=40)
    assert found.after < found.before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock)
    for name, parameter in rest.items():
        assert torch.equal(model.get_parameter(name), parameter), name
        assert model.get_parameter(name).requires_grad
    again = fit(model, tiny.tokens(6, 24), steps=0)
    assert again.before == pytest.approx(found.after, rel=1e-5)


def test_a_fit_recovers_a_bias_that_is_there() -> None:
    """Of queries and keys that all tokens share, a rotation makes a bias by distance: t5 can be just that."""
    stock = tiny.model("llama", dtype=torch.float32, attention_bias=True)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.zero_()
            elif name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    attention = stock.model.layers[1].self_attn
    length, size = 16, tiny.WIDTH // tiny.HEADS
    query = attention.q_proj.bias.detach().view(tiny.HEADS, 1, size)
    key = attention.k_proj.bias.detach().view(-1, 1, size).repeat_interleave(2, 0)
    turn = oracles.complex_turn(length, 10000.0, size, interleaved=False)
    turned_query, turned_key = (turn(of[None].expand(-1, -1, length, -1).double()) for of in (query, key))
    logits = (turned_query[0, :, -1:] @ turned_key[0].transpose(-1, -2))[:, 0] * size**-0.5
    scheme = {"type": "t5", "shared": False, "num_buckets": 64, "max_distance": 128}
    model = hf_posenc.retrofit(stock, with_handover(scheme, 4))
    found = fit(model, tiny.tokens(2, length), steps=300, rate=0.1)
    assert found.before > 0.05
    assert found.after < 1e-4
    table = model.model.layers[1].self_attn.position_scheme["0"].weight.detach()
    by_distance = table[:length].flip(0).t()  # bucket 0 is the token itself, which is the last key of the last query
    # Adam stops 3e-4 short of it after so many steps; the bias itself goes over 2.5.
    expected = (logits - logits[:, -1:]).to(table.dtype)
    torch.testing.assert_close(by_distance - by_distance[:, -1:], expected, rtol=0, atol=2e-3)
    assert expected.abs().max() > 1


def test_projections_are_fitted_where_asked() -> None:
    model, ids = handing("llama", "alibi"), tiny.tokens(4, 24)
    fixed = fit(model, ids, steps=5)
    assert fixed.after == fixed.before
    moved = fit(model, ids, steps=30, projections=True)
    assert moved.after < 0.9 * moved.before


def test_what_a_table_adds_everywhere_is_kept() -> None:
    ids = tiny.tokens(3, 20)
    stock = tiny.model("bert")
    table = stock.base_model.embeddings.position_embeddings.weight
    with torch.no_grad():
        table += torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(1), dtype=table.dtype)
        with recorded(layers_of(stock)) as known:
            logits = stock(ids, token_type_ids=ids % 2).logits
    off = {}
    for kept in (True, False):
        model = tiny.model("bert")
        model.load_state_dict(stock.state_dict())
        handover = hf_posenc.Handover(model, "none", steps=1)
        if kept:
            centre_tables(model, 20)
        with torch.no_grad():  # nothing has been handed over yet
            torch.testing.assert_close(model(ids, token_type_ids=ids % 2).logits, logits, rtol=0, atol=1e-9)
        handover.finish()
        with recorded(layers_of(model)) as states, torch.no_grad():
            model(ids, token_type_ids=ids % 2)
        off[kept] = (states[0] - known[0]).square().mean().item()
    assert off[True] < 0.2 * off[False]


@pytest.mark.parametrize(("architecture", "scheme"), [("bert", ["learned", "t5"]), ("gpt2", "t5"), ("llama", "t5")])
def test_where_nothing_is_to_be_kept_nothing_moves(architecture: str, scheme: Any) -> None:
    """A table that stays, one whose mean has no place to go to, and none."""
    model = hf_posenc.retrofit(tiny.model(architecture), with_handover(scheme, 2))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    centre_tables(model, 20)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_mixes_do_not_learn_faster() -> None:
    model = tiny.model("gpt2", [{"type": "sinusoidal", "mix": "concat"}, "t5"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[found] for found in learns_faster(model)} == {"transformer.position_scheme.1.table.weight"}
    assert any("position_scheme.0" in name for name in names.values())


def test_states_inside_fade_and_what_a_model_gives_does_not() -> None:
    ids = tiny.tokens()
    lesson = Teacher(tiny.model("gpt2")).look_at({"input_ids": ids})
    other = tiny.model("gpt2", "none")
    with recorded(layers_of(other)) as states:
        logits = other(ids).logits
    off = [
        lesson.distance(states[1:], shares=[float(place == which) for place in range(tiny.LAYERS)]).item()
        for which in range(tiny.LAYERS)
    ]
    assert sum(off) == pytest.approx(lesson.distance(states[1:]).item())
    whole = lesson.parts(Weights(), logits, states[1:], None)
    faded = lesson.parts(Weights(), logits, states[1:], None, inside=0.25)
    assert faded["distance"].item() == pytest.approx(0.25 * whole["distance"].item())
    assert set(lesson.parts(Weights(), logits, states[1:], None, inside=0.0)) == {"divergence"}
    headless = lesson.parts(Weights(), None, states[1:], None, inside=0.0)
    assert set(headless) == {"distance", "pooled"}
    assert headless["distance"].item() == pytest.approx(Weights().states * off[-1])
    means = states[-1].mean(1), lesson.states[-1].mean(1)
    expected = (1 - nn.functional.cosine_similarity(*means)).mean().item()
    assert headless["pooled"].item() == pytest.approx(Weights().states * expected, rel=1e-4)
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    means = states[-1][:, :4].mean(1), lesson.states[-1][:, :4].mean(1)
    expected = (1 - nn.functional.cosine_similarity(*means)).mean().item()
    assert lesson.pooled(states[-1], mask).item() == pytest.approx(expected, rel=1e-4)


def test_fit_needs_the_old_encoding() -> None:
    with pytest.raises(ValueError, match="start of a handover"):
        fit(tiny.model("gpt2", "t5"), tiny.tokens())


@pytest.mark.parametrize(
    ("ids", "settings", "match"),
    [
        (tiny.tokens(4)[:0], {}, r"int64 of shape \(0, 12\)"),
        (tiny.tokens(4)[0], {}, r"int64 of shape \(12,\)"),
        (tiny.tokens(4).float(), {}, "float32"),
        (tiny.tokens(4).tolist(), {}, "got list"),
        (tiny.tokens(4), {"rows": 0}, "rows=0"),
        (tiny.tokens(4), {"steps": -1}, "steps=-1"),
    ],
)
def test_fit_says_what_text_it_needs(ids: Any, settings: dict[str, int], match: str) -> None:
    model = tiny.model("llama")
    hf_posenc.Handover(model, "t5", steps=5)
    with pytest.raises(ValueError, match=match):
        hf_posenc.fit(model, ids, **settings)


def test_a_table_is_not_fitted_to_a_row_at_a_time() -> None:
    """All of it would be taken for position, and nothing be left for the content."""
    model = tiny.model("gpt2", None, torch.float32)
    hf_posenc.Handover(model, "shaw", steps=2)
    ids = torch.randint(5, 50, (3, 8))
    for given, rows in ((ids[:1], 2), (ids, 1)):
        with pytest.raises(ValueError, match="several rows have in common"):
            hf_posenc.fit(model, given, rows=rows, steps=1)
    hf_posenc.fit(model, ids, rows=2, steps=3)


def test_a_rate_of_nothing_is_a_rate() -> None:
    model = tiny.model("gpt2", None, torch.float32)
    hf_posenc.Handover(model, "rope", steps=2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.randint(5, 50, (4, 8))
    hf_posenc.fit(model, ids, projections=True, projection_rate=0.0, steps=2)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    hf_posenc.fit(model, ids, projections=True, steps=4)
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
