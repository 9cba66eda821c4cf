"""All ways to a variant lead to the same model; saving and loading keep it, and the load report says what is true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)
from transformers.models.auto import modeling_auto

import hf_posenc
from hf_posenc.errors import install_command
from tests.support import tiny_models as tiny
from tests.support.cases import Case, pairs

STOCK_CONFIGS = {"bert": BertConfig, "gpt2": GPT2Config, "llama": LlamaConfig}
AUTO = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}
by_architecture = pytest.mark.parametrize("architecture", list(STOCK_CONFIGS))
by_pair = pairs(list(STOCK_CONFIGS))


@pytest.fixture
def stock(architecture: str, tmp_path: Path) -> Path:
    tiny.model(architecture, dtype=torch.float32).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def same_model(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    assert first.config.position_scheme == second.config.position_scheme
    weights, expected = first.state_dict(), second.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    ids = tiny.tokens()
    with torch.no_grad():
        assert torch.equal(first.eval()(ids)[0], second.eval()(ids)[0])


@by_pair
def test_all_ways_give_the_same_model(case: Case, architecture: str, stock: Path) -> None:
    auto = AUTO[architecture]
    torch.manual_seed(0)  # before each: the parameters of some schemes start at random
    direct = auto.from_pretrained(stock, position_scheme=case.scheme)
    assert type(direct).__name__.startswith("PosEnc")
    config = AutoConfig.from_pretrained(stock)
    config.position_scheme = case.scheme

    def load_patched() -> Any:
        with hf_posenc.patched(case.scheme):
            return auto.from_pretrained(stock)

    ways: list[Callable[[], Any]] = [
        lambda: auto.from_pretrained(stock, config=AutoConfig.from_pretrained(stock, position_scheme=case.scheme)),
        lambda: auto.from_pretrained(stock, config=config),
        lambda: hf_posenc.retrofit(auto.from_pretrained(stock), case.scheme),
        load_patched,
        lambda: direct.stock_class.from_pretrained(stock, position_scheme=case.scheme),
    ]
    for load in ways:
        torch.manual_seed(0)
        same_model(load(), direct)

    built = auto.from_config(config)
    built.load_state_dict(direct.state_dict())
    same_model(built, direct)
    built = direct.stock_class(STOCK_CONFIGS[architecture](**{**config.to_dict(), "position_scheme": case.scheme}))
    built.load_state_dict(direct.state_dict())
    same_model(built, direct)


HEAD_SCHEMES: list[Any] = [["rope", "t5"], "sinusoidal", "learned"]


def all_heads() -> list[Any]:
    """Every head with every scheme; `make test` runs each head with one."""
    rows: list[Any] = []
    for architecture in STOCK_CONFIGS:
        for name, auto in vars(modeling_auto).items():
            mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
            if mapping is not None and architecture in mapping._model_mapping:
                for number, scheme in enumerate(HEAD_SCHEMES):
                    marks = [] if (len(rows) // len(HEAD_SCHEMES)) % len(HEAD_SCHEMES) == number else [pytest.mark.slow]
                    rows.append(
                        pytest.param(architecture, auto, scheme, id=f"{architecture}-{name}-{scheme}", marks=marks)
                    )
    return rows


@pytest.mark.parametrize(("architecture", "auto", "scheme"), all_heads())
def test_every_head_that_the_auto_classes_know(
    architecture: str, auto: Any, scheme: Any, stock: Path, tmp_path: Path
) -> None:
    changes = {"is_decoder": True} if (architecture, auto.__name__) == ("bert", "AutoModelForCausalLM") else {}
    model = auto.from_pretrained(stock, position_scheme=scheme, **changes).eval()
    plain = auto.from_pretrained(stock, **changes)
    assert type(model).__name__ == f"PosEnc{type(plain).__name__}"
    assert isinstance(model, type(plain))
    choices = "MultipleChoice" in type(model).__name__ or "DoubleHeads" in type(model).__name__
    ids = tiny.tokens(2, 12).view(1, 2, 12) if choices else tiny.tokens(2, 12)
    with torch.no_grad():
        expected = model(ids)[0]
        model.save_pretrained(tmp_path / "variant")
        loaded = auto.from_pretrained(tmp_path / "variant")
        assert type(loaded) is type(model)
        weights = loaded.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
        # The last product's rounding depends on how memory is aligned, in stock models as well.
        torch.testing.assert_close(loaded(ids)[0], expected, rtol=0, atol=1e-6)


@pairs(list(STOCK_CONFIGS), how=["plain", "sharded", "device_map", "disk", "bfloat16"])
def test_saved_variants_come_back_to_the_bit(case: Case, architecture: str, how: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = tiny.model(architecture, case.scheme, dtype)
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if how == "sharded" else {}))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["position_scheme"] == case.scheme
    assert written["model_type"] == f"posenc_{architecture}"
    assert (
        len(list(tmp_path.glob("*.safetensors"))) > 1 if how == "sharded" else (tmp_path / "model.safetensors").exists()
    )

    if how == "disk":  # everything is read from disk when its module is called, the scheme's parameters too
        offloaded = AUTO[architecture].from_pretrained(tmp_path)
        accelerate.disk_offload(offloaded, tmp_path / "offload")
        assert all(parameter.is_meta for parameter in offloaded.parameters())
        with torch.no_grad():
            torch.testing.assert_close(offloaded(tiny.tokens())[0], model(tiny.tokens())[0], rtol=0, atol=1e-6)
        return
    settings = {"device_map": "auto"} if how == "device_map" else {"dtype": dtype}
    loaded, info = AUTO[architecture].from_pretrained(tmp_path, output_loading_info=True, **settings)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same_model(loaded, model)
    assert not any(parameter.is_meta for parameter in loaded.parameters())


@by_pair
def test_into_another_head(case: Case, architecture: str, tmp_path: Path) -> None:
    model = tiny.model(architecture, case.scheme, torch.float32)
    model.save_pretrained(tmp_path)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any("position_scheme" in name for name in info["missing_keys"])
    base = AutoModel.from_pretrained(tmp_path)
    ids = tiny.tokens()
    with torch.no_grad():
        expected = model.base_model(ids)[0]
        assert torch.equal(classifier.base_model(ids)[0], expected)
        assert torch.equal(base(ids)[0], expected)


@by_pair
def test_report_of_a_fresh_retrofit_is_clean(case: Case, architecture: str, stock: Path) -> None:
    _, info = AUTO[architecture].from_pretrained(stock, position_scheme=case.scheme, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info


def damage(directory: Path, fragment: str) -> None:
    weights = load_file(directory / "model.safetensors")
    victim = next(name for name in sorted(weights) if fragment in name)
    del weights[victim]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "fragment"), [("gpt2", "mlp.c_fc.weight"), ("llama", "up_proj"), ("bert", "intermediate")]
)
def test_report_still_names_real_damage(architecture: str, fragment: str, stock: Path) -> None:
    damage(stock, fragment)
    _, info = AUTO[architecture].from_pretrained(stock, position_scheme="t5", output_loading_info=True)
    assert len(info["missing_keys"]) == 1
    assert fragment in next(iter(info["missing_keys"]))


@by_architecture
@pytest.mark.parametrize("shared", [True, False])
def test_report_names_a_missing_parameter_of_a_saved_variant(architecture: str, shared: bool, tmp_path: Path) -> None:
    tiny.model(architecture, {"type": "t5", "shared": shared}, torch.float32).save_pretrained(tmp_path)
    damage(tmp_path, "position_scheme")
    loaded, info = AUTO[architecture].from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 1
    assert "position_scheme" in next(iter(info["missing_keys"]))
    name = next(iter(info["missing_keys"]))
    assert loaded.get_parameter(name).abs().max() == 0


@by_architecture
def test_another_scheme_for_a_saved_variant(architecture: str, tmp_path: Path) -> None:
    tiny.model(architecture, "t5", torch.float32).save_pretrained(tmp_path)
    model, info = AUTO[architecture].from_pretrained(tmp_path, position_scheme="alibi", output_loading_info=True)
    assert model.config.position_scheme == "alibi"
    assert not info["missing_keys"]
    assert ["position_scheme" in name for name in info["unexpected_keys"]] == [True]  # a trained table is let go
    # What the first conversion dropped, and what has moved within the list, must not pass unseen.
    _, info = AUTO[architecture].from_pretrained(tmp_path, position_scheme="learned", output_loading_info=True)
    assert len(info["missing_keys"]) == 1
    _, info = AUTO[architecture].from_pretrained(tmp_path, position_scheme=["rope", "t5"], output_loading_info=True)
    assert len(info["missing_keys"]) == len(info["unexpected_keys"]) == 1
    damage(tmp_path, "position_scheme")
    _, info = AUTO[architecture].from_pretrained(tmp_path, position_scheme={"type": "t5"}, output_loading_info=True)
    assert len(info["missing_keys"]) == 1


@by_architecture
def test_a_fresh_config_does_not_hide_dropped_scheme_parameters(architecture: str, tmp_path: Path) -> None:
    """An explicit config knows nothing of the checkpoint, which may hold the trained parameters of another scheme."""
    tiny.model(architecture, "t5", torch.float32).save_pretrained(tmp_path)
    for scheme, dropped in (("alibi", 1), (["alibi", "t5"], 1), ("t5", 0)):
        config = tiny.config(architecture, position_scheme=scheme)
        _, info = AUTO[architecture].from_pretrained(tmp_path, config=config, output_loading_info=True)
        assert ["position_scheme" in name for name in info["unexpected_keys"]] == [True] * dropped, scheme


def is_shared(name: str) -> bool:
    """Whether a parameter is in no layer."""
    return not any(word.isdigit() for word in name.split("position_scheme")[0].split("."))


@by_pair
def test_new_parameters_are_initialised_not_left_to_chance(case: Case, architecture: str, stock: Path) -> None:
    """Memory that the allocator hands out dirty would show: fill it with NaN first."""
    poison = [
        torch.full((size,), float("nan")) for size in (4, 8, 32, 72, 128, 256, 1024, 1536, 2048) for _ in range(50)
    ]
    del poison
    model = AUTO[architecture].from_pretrained(stock, position_scheme=case.scheme)
    for name, parameter in model.named_parameters():
        if "position_scheme" not in name:
            continue
        assert parameter.isfinite().all(), name
        values = parameter.detach().unique().tolist()
        if name.endswith("slopes"):
            torch.testing.assert_close(parameter.detach(), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
        elif name.endswith((".a", ".p")):
            assert values in ([0.0], [1.0]), name
        elif name.endswith(".slope"):  # 0, or without a bias, one over the mean of log n
            assert values == [0.0] or 0 < min(values) == max(values) < 1, name
        elif name.endswith("norm.weight"):
            assert values == [1.0], name
        elif name.endswith((".rate", ".length")):
            assert parameter.item() in (pytest.approx(0.1), 512.0), name
        elif (
            ".inner_" in name
            or (is_shared(name) and name.endswith(".table"))
            or ("cable" in case.id and name.endswith("gate_weight"))  # its strength is what starts at 0
        ):
            assert 0 < parameter.abs().max() <= 1, name
        elif name.endswith("mixer.query"):
            assert values == [0.0], name
        elif "mixer" in name or name.endswith("_projection"):
            silent = "xl" in case.id or (is_shared(name) and name.endswith("query_projection"))
            if silent:
                assert values == [0.0], name
                continue
            assert values in ([0.0, 1.0], [0.0, 2.0]), name
        else:
            assert parameter.abs().max() == 0, name
    assert not [name for name, _ in model.named_buffers() if "position_scheme" in name]
    with torch.no_grad():
        assert model(tiny.tokens())[0].isfinite().all()


@by_architecture
def test_configs(architecture: str, tmp_path: Path) -> None:
    config = tiny.config(architecture)
    assert type(config) is STOCK_CONFIGS[architecture]
    assert config.position_scheme is None
    before = config.to_dict()
    config.position_scheme = {"type": "t5", "num_buckets": 16}
    assert type(config).__name__ == f"PosEnc{STOCK_CONFIGS[architecture].__name__}"
    assert isinstance(config, STOCK_CONFIGS[architecture])
    assert config.to_dict() == {
        **before,
        "model_type": f"posenc_{architecture}",
        "position_scheme": config.position_scheme,
    }
    config.save_pretrained(tmp_path)
    config._name_or_path = str(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path) == config
    stock_class = STOCK_CONFIGS[architecture]
    assert stock_class.from_pretrained(tmp_path, name_or_path=str(tmp_path)) == config
    assert AutoConfig.from_pretrained(tmp_path, position_scheme="rope") != config
    with pytest.raises(ValueError, match="would load it as a stock model"):
        AutoConfig.from_pretrained(tmp_path, position_scheme=None)
    fresh = tiny.config(architecture, position_scheme="rope")
    fresh.position_scheme = None
    assert type(fresh) is STOCK_CONFIGS[architecture]
    assert fresh.to_dict() == before


@by_architecture
def test_a_variant_whose_config_lost_its_scheme_is_refused(architecture: str, tmp_path: Path) -> None:
    tiny.model(architecture, "rope", torch.float32).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["position_scheme"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=f"posenc_{architecture} config needs a position_scheme"):
        AUTO[architecture].from_pretrained(tmp_path)


def test_marked_fields_come_back(tmp_path: Path) -> None:
    marked = {"hidden_act": "relu", "initializer_range": 0.03}
    config = tiny.config("bert", position_scheme="rope", **marked)
    config.save_pretrained(tmp_path)
    written, read = json.loads((tmp_path / "config.json").read_text()), AutoConfig.from_pretrained(tmp_path)
    for field, value in marked.items():
        assert install_command() in written[field]
        assert getattr(read, field) == value
