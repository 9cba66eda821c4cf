"""Teachers, text of a model's own, what is trained, and warm starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_posenc.training.own_text import own_text
from hf_posenc.training.parameters import train_positions_only
from hf_posenc.training.rates import learns_faster, parameter_groups
from hf_posenc.training.teacher import Teacher, Weights, layers_of, recorded
from tests.support import tiny_models as tiny

ARCHITECTURES = ["bert", "gpt2", "llama"]


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
