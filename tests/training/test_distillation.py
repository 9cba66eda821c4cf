"""Teachers, the distillation loss, self-generated text, and which parameters are trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_posenc.errors import PosEncError
from hf_posenc.training import (
    LossWeights,
    Teacher,
    generate_text,
    parameter_groups,
    record_hidden_states,
    train_positions_only,
    transformer_layers,
)
from hf_posenc.training.optimizer import add_lora, scheme_parameter_ids
from tests.support import tiny_models as tiny

ARCHITECTURES = ["bert", "gpt2", "llama"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_teacher_has_no_loss_against_itself(architecture: str) -> None:
    ids = tiny.tokens()
    teacher = Teacher(tiny.model(architecture))
    target = teacher.forward({"input_ids": ids})
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    same = tiny.model(architecture)
    with record_hidden_states(transformer_layers(same)) as states:
        logits = same(ids).logits
    assert len(states) == tiny.LAYERS
    assert target.kl_divergence(logits).item() == pytest.approx(0, abs=1e-6)
    assert target.hidden_distance(states).item() == pytest.approx(0, abs=1e-12)
    other = tiny.model(architecture, "none")
    with record_hidden_states(transformer_layers(other)) as states:
        logits = other(ids).logits
    assert target.logits_BNV is not None
    expected_log, log = target.logits_BNV.log_softmax(-1), logits.log_softmax(-1)
    expected = nn.functional.kl_div(
        log.flatten(0, 1), expected_log.flatten(0, 1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(target.kl_divergence(logits).double(), expected, rtol=1e-4, atol=0)
    assert target.hidden_distance(states).item() > 1e-3


def test_padding_is_ignored() -> None:
    ids = tiny.tokens(2, 8)
    target = Teacher(tiny.model("gpt2")).forward({"input_ids": ids})
    other = tiny.model("gpt2", "none")
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with record_hidden_states(transformer_layers(other)) as states:
        logits = other(ids).logits
    changed = logits.detach().clone()
    changed[1, 4:] += 10 * torch.randn_like(changed[1, 4:])
    assert target.kl_divergence(logits, mask).item() == target.kl_divergence(changed, mask).item()
    assert target.kl_divergence(logits).item() != target.kl_divergence(changed).item()
    worse = [state.detach().clone() for state in states]
    for state in worse:
        state[1, 4:] += 1
    assert target.hidden_distance(worse, mask).item() == target.hidden_distance(states, mask).item()


def test_teacher_shares_frozen_weights() -> None:
    """Adapters and positions leave the other weights as they are, so the teacher needs no copy of them."""
    ids = tiny.tokens()
    teacher, student = Teacher(tiny.model("llama")), tiny.model("llama", "t5")
    expected = teacher.forward({"input_ids": ids}).logits_BNV
    assert teacher.share_frozen_weights(student) == 0, "control: everything is trained"
    add_lora(student, 2, [])
    assert teacher.share_frozen_weights(student) == sum(p.numel() for p in teacher.model.parameters())
    pointers = {parameter.data_ptr() for parameter in student.parameters()}
    assert all(parameter.data_ptr() in pointers for parameter in teacher.model.parameters())
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, 1.0)
    student(ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(teacher.forward({"input_ids": ids}).logits_BNV, expected)
    other = tiny.model("llama", "t5", seed=1).requires_grad_(False)
    assert teacher.share_frozen_weights(other) == 0, "weights that differ are not shared"


def test_text_is_sampled_from_the_model() -> None:
    model = tiny.model("gpt2", dtype=torch.float32).train()
    first = generate_text(model, 5, 12, batch_size=2, progress=False)
    assert first.shape == (5, 12)
    assert (first[:, 0] == model.config.bos_token_id).all()
    assert model.training
    assert torch.equal(first, generate_text(model, 5, 12, batch_size=2, progress=False))
    assert not torch.equal(first, generate_text(model, 5, 12, batch_size=2, seed=1, progress=False))
    with torch.no_grad():  # sampled text is more likely under the model than random text
        chance = torch.randint(3, tiny.VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(0))
        sampled = generate_text(model, 64, 12, progress=False)
        assert model(sampled, labels=sampled).loss < model(chance, labels=chance).loss
    model.generation_config.update(repetition_penalty=5.0, min_p=0.5, num_beams=2, suppress_tokens=[7])
    assert torch.equal(first, generate_text(model, 5, 12, batch_size=2, progress=False))
    assert model.generation_config.num_beams == 2
    with pytest.raises(PosEncError, match="48 positions"):
        generate_text(model, 1, tiny.TRAINED_LENGTH + 1)
    model.config.bos_token_id, model.config.eos_token_id = None, [2, 3]
    assert (generate_text(model, 2, 4, progress=False)[:, 0] == 2).all()
    model.config.bos_token_id = model.config.eos_token_id = None
    with pytest.raises(PosEncError, match="--data"):
        generate_text(model, 1, 4)


def test_train_positions_only() -> None:
    model = tiny.model("gpt2", ["learned", "t5"])
    expected = 32 * tiny.HEADS
    assert train_positions_only(model) == expected
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected
    with pytest.raises(PosEncError, match="no parameters"):
        train_positions_only(tiny.model("gpt2", "alibi"))


def test_position_parameters_have_their_own_group_without_decay() -> None:
    model = tiny.model("llama", ["rope", "t5"])
    other, positions = parameter_groups(model, 1e-3, 1e-2, weight_decay=0.1)
    assert (other["lr"], other["weight_decay"]) == (1e-3, 0.1)
    assert (positions["lr"], positions["weight_decay"]) == (1e-2, 0.0)
    assert len(positions["params"]) == 1
    assert len(other["params"]) == len(list(model.parameters())) - 1
    torch.optim.AdamW([other, positions])
    assert len(parameter_groups(tiny.model("llama", "none"), 1e-3)) == 1


def test_input_schemes_have_the_usual_learning_rate() -> None:
    model = tiny.model("gpt2", [{"type": "sinusoidal", "mix": "concat"}, "t5"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[key] for key in scheme_parameter_ids(model)} == {"transformer.position_scheme.1.table.weight"}
    assert any("position_scheme.0" in name for name in names.values())


def test_hidden_loss_is_scaled_except_for_a_headless_output() -> None:
    ids = tiny.tokens()
    target = Teacher(tiny.model("gpt2")).forward({"input_ids": ids})
    other = tiny.model("gpt2", "none")
    with record_hidden_states(transformer_layers(other)) as states:
        logits = other(ids).logits
    by_layer = [
        target.hidden_distance(states, layer_scales=[float(layer == number) for number in range(tiny.LAYERS)]).item()
        for layer in range(tiny.LAYERS)
    ]
    assert sum(by_layer) == pytest.approx(target.hidden_distance(states).item())
    whole = target.losses(LossWeights(), logits, states, None)
    faded = target.losses(LossWeights(), logits, states, None, hidden_scale=0.25)
    assert faded["hidden_loss"].item() == pytest.approx(0.25 * whole["hidden_loss"].item())
    assert set(target.losses(LossWeights(), logits, states, None, hidden_scale=0.0)) == {"kl_loss"}
    headless = target.losses(LossWeights(), None, states, None, hidden_scale=0.0)
    assert set(headless) == {"hidden_loss", "pooled_loss"}
    assert headless["hidden_loss"].item() == pytest.approx(LossWeights().hidden * by_layer[-1])
    means = states[-1].mean(1), target.hidden_states[-1].mean(1)
    expected = (1 - nn.functional.cosine_similarity(*means)).mean().item()
    assert headless["pooled_loss"].item() == pytest.approx(LossWeights().hidden * expected, rel=1e-4)
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    means = states[-1][:, :4].mean(1), target.hidden_states[-1][:, :4].mean(1)
    expected = (1 - nn.functional.cosine_similarity(*means)).mean().item()
    assert target.pooled_distance(states[-1], mask).item() == pytest.approx(expected, rel=1e-4)
