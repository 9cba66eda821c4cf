"""Recipes by name: each drops some positions of a trained model, and trains it without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.cli.train import build_request
from hf_posenc.errors import PosEncError
from hf_posenc.training import RECIPES, TrainRequest, get_recipe, train
from hf_posenc.training.recipes import NAIVE, RECOMMENDED
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.training_runs import LENGTH, settings

FOURTH_LAYER: dict[str, Any] = {"type": "none", "layers": "3::4"}


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_level.saved("llama", tmp_path_factory.mktemp("stock") / "llama", num_hidden_layers=4)


@torch.no_grad()
def changes_with_positions(model: Any) -> bool:
    """Whether logits depend on distances: those between tokens are doubled."""
    input_ids, positions = tiny.tokens(1, LENGTH), torch.arange(LENGTH)[None]
    near, far = (model(input_ids, position_ids=factor * positions).logits for factor in (1, 2))
    return not torch.allclose(near, far, atol=1e-5)


@torch.no_grad()
def divergence(stock: Any, model: Any) -> float:
    """The KL divergence of a model's predictions from the original's, on text like that of the training."""
    words = word_level.text(8 * LENGTH, seed=1).split()
    input_ids = torch.tensor([int(word[1:]) for word in words]).view(8, LENGTH)
    expected, found = (each(input_ids).logits.log_softmax(-1) for each in (stock, model))
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [
        ("drope", "none"),
        pytest.param("nope-layers", FOURTH_LAYER, marks=pytest.mark.slow),
        pytest.param("p-rope", {"type": "rope", "frequency_fraction": 0.75}, marks=pytest.mark.slow),
    ],
)
def test_recipe_from_checkpoint_to_variant(
    recipe: str, scheme: Any, four_layers: Path, text: Path, tmp_path: Path
) -> None:
    line = ["train", "--model", four_layers, "--recipe", recipe, "--data", text]
    line += ["--train-length", LENGTH, "--max-steps", 8, "--learning-rate", 3e-3, "--output-dir", tmp_path / "out"]
    line += ["--use-cpu", "--save-strategy", "no"]
    result = CliRunner().invoke(app, [str(word) for word in line])
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.position_scheme == scheme
    assert changes_with_positions(model) == (recipe != "drope")
    assert model(tiny.tokens(1, 4 * tiny.TRAINED_LENGTH)).logits.isfinite().all(), "no table ends it"
    if recipe == "drope":  # the others change too little of so small a model for training to show
        stock = AutoModelForCausalLM.from_pretrained(four_layers).eval()
        swapped = AutoModelForCausalLM.from_pretrained(four_layers, position_scheme=scheme).eval()
        assert divergence(stock, model) < 0.9 * divergence(stock, swapped), "the original was the teacher"


def test_recipe_decides_the_scheme_unless_one_is_given() -> None:
    common = {"model": "m", "data": "d", "train_length": "8"}
    assert build_request({**common, "recipe": "nope-layers"}).scheme == FOURTH_LAYER
    assert build_request({**common, "recipe": "drope", "scheme": json.dumps(FOURTH_LAYER)}).scheme == FOURTH_LAYER
    assert build_request({**common, "recipe": "naive"}).scheme is None
    assert TrainRequest(**common, recipe=RECIPES["p-rope"], scheme="rope").scheme == "rope"
    without_teacher = build_request({**common, "recipe": "drope", "teacher": False})
    assert (without_teacher.scheme, without_teacher.recipe.teacher) == ("none", False)


@pytest.mark.parametrize(
    ("name", "scheme", "match"),
    [
        ("drop", None, "Unknown --recipe 'drop'; expected one of .*drope"),
        ("drope", "alibi", "--recipe drope is about the scheme none, but --scheme has alibi"),
        ("drope", ["rope", {"type": "temperature"}], "has rope, temperature"),
        ("p-rope", "none", "about the scheme rope"),
    ],
)
def test_recipe_about_another_scheme_is_refused(name: str, scheme: Any, match: str) -> None:
    with pytest.raises(PosEncError, match=match):
        get_recipe(name, scheme)


def test_schemes_that_fit_a_recipe() -> None:
    temperature = {"type": "temperature", "form": "ssmax"}
    for scheme in (None, "none", FOURTH_LAYER, ["rope", FOURTH_LAYER], temperature):
        assert get_recipe("drope", scheme) is RECIPES["drope"]
    assert get_recipe("p-rope", {"type": "rope", "frequency_fraction": 0.5}) is RECIPES["p-rope"]
    assert get_recipe("recommended", "alibi") is RECOMMENDED
    assert get_recipe("naive", "alibi") is NAIVE


def test_models_that_cannot_drop_positions(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    def run(model: Path, recipe: str) -> None:
        request = TrainRequest(str(model), str(text), str(LENGTH), recipe=RECIPES[recipe])
        train(request, settings(tmp_path / "out", max_steps=1))

    with pytest.raises(PosEncError, match="is an encoder, which sees no order without positions"):
        run(stock["bert"], "drope")
    with pytest.raises(PosEncError, match="'3::4' selects none of the 3 layers"):
        run(stock["llama"], "nope-layers")
    tiny.model("llama", "none", torch.float32).save_pretrained(tmp_path / "variant")
    with pytest.raises(PosEncError, match="already has the position scheme 'none': leave out --recipe"):
        run(tmp_path / "variant", "drope")
