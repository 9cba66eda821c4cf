"""retrofit, restore and patched: live models changed and changed back, scripts that nobody can edit."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertModel, GPT2LMHeadModel, GPT2Model, LlamaModel, T5Config, T5Model

import hf_posenc
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES, Case, pairs


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def recorded(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids, output_attentions=True, output_hidden_states=True)


@pairs(ARCHITECTURES)
def test_restore_gives_the_stock_model_back_to_the_bit(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, dtype=torch.float32), tiny.tokens()
    model.set_attn_implementation("eager")
    classes = [type(module) for module in model.modules()]
    before, weights, config = recorded(model, ids), state(model), model.config.to_dict()

    assert hf_posenc.retrofit(model, case.scheme) is model
    during = recorded(model, ids)
    assert len(during.attentions) == len(before.attentions) == tiny.LAYERS
    assert len(during.hidden_states) == tiny.LAYERS + 1
    starts_as_stock = {"learned", "learned+t5", "learned+ssmax", "rope"} | (
        {"rope+shaw"} if architecture == "llama" else set()
    )
    starts_as_stock |= {"learned-concat", "learned-attention"} if architecture == "gpt2" else set()
    if case.id not in starts_as_stock:
        assert not torch.equal(during.logits, before.logits)

    assert hf_posenc.restore(model) is model
    after = recorded(model, ids)
    assert torch.equal(after.logits, before.logits)
    assert all(map(torch.equal, after.attentions, before.attentions))
    assert [type(module) for module in model.modules()] == classes
    assert state(model).keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state(model).items())
    assert model.config.to_dict() == config
    assert not [name for name in vars(model.base_model) if "posenc" in name]


def test_restore_follows_the_model_to_its_dtype() -> None:
    model = hf_posenc.retrofit(tiny.model("gpt2", dtype=torch.float32), "rope").to(torch.bfloat16)
    hf_posenc.restore(model)
    assert model.transformer.wpe.weight.dtype == torch.bfloat16
    assert model(tiny.tokens()).logits.dtype == torch.bfloat16


def test_restore_keeps_what_was_trained_since() -> None:
    model = hf_posenc.retrofit(tiny.model("gpt2", dtype=torch.float32), "alibi")
    with torch.no_grad():
        model.transformer.wte.weight.add_(1.0)
    trained = model.transformer.wte.weight.clone()
    assert torch.equal(hf_posenc.restore(model).transformer.wte.weight, trained)


@pytest.mark.parametrize(
    "scheme", ["t5", "learned", "rope", {"type": "learned", "max_positions": 96, "extend": "tile"}]
)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_copies_are_whole(scheme: Any, copied: Any, architecture: str) -> None:
    stock, ids = tiny.model(architecture, dtype=torch.float32), tiny.tokens()
    expected = stock(ids).logits
    model = hf_posenc.retrofit(stock, scheme)
    with_scheme = model(ids).logits
    twin = copied(model)
    assert torch.equal(twin(ids).logits, with_scheme)
    assert torch.equal(hf_posenc.restore(twin)(ids).logits, expected)
    assert torch.equal(model(ids).logits, with_scheme)


def refused(model: Any, scheme: Any, match: str) -> None:
    """Raises, and leaves the model exactly as it was."""
    classes, weights = [type(module) for module in model.modules()], state(model)
    config = model.config.to_dict()
    with pytest.raises(ValueError, match=match):
        hf_posenc.retrofit(model, scheme)
    assert [type(module) for module in model.modules()] == classes
    assert model.config.to_dict() == config
    assert state(model).keys() == weights.keys()


def test_refusals_change_nothing() -> None:
    gpt2 = tiny.model("gpt2", dtype=torch.float32)
    refused(gpt2, "ropee", "did you mean 'rope'")
    refused(gpt2, {"type": "alibi", "layers": [0, 7]}, "layer 7.*layers 0 to 2")
    refused(gpt2, {"type": "rope", "partial_rotary_factor": 0.4}, "pairs")
    refused(gpt2, {"type": "learned", "max_positions": 500}, "extend")
    refused(gpt2, {"type": "rope", "scaling": {"rope_type": "yarm"}}, "yarm")
    odd = GPT2LMHeadModel(tiny.config("gpt2", n_embd=12, n_head=4))
    refused(odd, "rope", "head size 3")
    odd = GPT2LMHeadModel(tiny.config("gpt2", reorder_and_upcast_attn=True))
    refused(odd, "alibi", "reorder_and_upcast_attn")
    refused(
        T5Model(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)),
        "rope",
        "T5Model with a T5Config.*several stacks.*families",
    )
    gpt2.config._attn_implementation_internal = "flash_attention_2"
    refused(gpt2, "alibi", "flash_attention_2.*alibi.*sdpa")
    gpt2.config._attn_implementation_internal = "sdpa"
    gpt2.transformer.h[1].attn.forward = gpt2.transformer.h[1].attn.forward
    refused(gpt2, "alibi", "hook")


def test_retrofit_twice_is_refused() -> None:
    model = hf_posenc.retrofit(tiny.model("gpt2", dtype=torch.float32), "rope")
    refused(model, "alibi", "already")


def test_restore_of_what_was_never_changed_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to restore"):
        hf_posenc.restore(tiny.model("gpt2"))
    with pytest.raises(ValueError, match="load the stock checkpoint"):
        hf_posenc.restore(GPT2LMHeadModel(tiny.config("gpt2", position_scheme="rope")))


BUILDERS = {"bert": BertModel, "gpt2": GPT2Model, "llama": LlamaModel}


@pytest.mark.parametrize("architecture", list(BUILDERS))
def test_patched_reaches_every_model_built_inside_and_none_outside(architecture: str) -> None:
    build, config = BUILDERS[architecture], tiny.config(architecture)
    before = config.to_dict()
    with hf_posenc.patched("alibi"):
        assert build(config).config.position_scheme == "alibi"
        assert AutoModel.from_config(config).config.position_scheme == "alibi"
        with hf_posenc.patched({"type": "t5"}):
            assert build(config).config.position_scheme == {"type": "t5"}
        assert build(config).config.position_scheme == "alibi"
        named = tiny.config(architecture, position_scheme="rope")
        assert build(named).config.position_scheme == "rope"
    assert config.to_dict() == before
    outside = build(config)
    assert type(outside) is build
    assert outside.config is config


def test_patched_ends_with_an_exception_too() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), hf_posenc.patched("alibi"):
        raise RuntimeError("on purpose")
    assert type(GPT2Model(tiny.config("gpt2"))) is GPT2Model
    with pytest.raises(ValueError, match="unknown type"), hf_posenc.patched("nonsense"):
        pass


def test_patched_stays_in_its_thread() -> None:
    schemes: dict[str, Any] = {}
    inside, outside_done = threading.Event(), threading.Event()

    def within() -> None:
        with hf_posenc.patched("rope"):
            inside.set()
            assert outside_done.wait(60)
            schemes["inside"] = GPT2Model(tiny.config("gpt2")).config.position_scheme

    def without() -> None:
        assert inside.wait(60)
        schemes["outside"] = GPT2Model(tiny.config("gpt2")).config.position_scheme
        outside_done.set()

    threads = [threading.Thread(target=target) for target in (within, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert schemes == {"inside": "rope", "outside": None}


def test_models_that_share_a_config_are_changed_one_at_a_time(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny.config("gpt2")
    first, second = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    hf_posenc.retrofit(first, "alibi")
    assert second.config is config
    assert config.position_scheme is None
    hf_posenc.retrofit(second, "rope")
    hf_posenc.restore(first)
    second.save_pretrained(tmp_path / "other")
    first.save_pretrained(tmp_path / "one")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "other")).__name__ == "PosEncGPT2LMHeadModel"
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "one")) is GPT2LMHeadModel


def test_a_head_with_a_config_of_its_own_is_changed_too(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = GPT2LMHeadModel(tiny.config("gpt2"))
    model.config = copy.deepcopy(model.config)
    hf_posenc.retrofit(model, "rope").save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "PosEncGPT2LMHeadModel"


def test_a_stock_config_put_into_a_variant_names_the_scheme() -> None:
    model = hf_posenc.retrofit(GPT2LMHeadModel(tiny.config("gpt2")), "rope")
    model.config = tiny.config("gpt2")
    assert model.config.position_scheme == "rope"


def test_a_variant_class_needs_a_scheme() -> None:
    from hf_posenc.models import PosEncGPT2LMHeadModel

    with pytest.raises(ValueError, match="needs a config with a position_scheme"):
        PosEncGPT2LMHeadModel(tiny.config("gpt2"))


def test_threads_that_build_at_once_get_one_class() -> None:
    class Own(GPT2Model):
        pass

    barrier, made = threading.Barrier(4), []

    def build() -> None:
        barrier.wait(60)
        made.append(type(Own(tiny.config("gpt2", position_scheme="rope"))))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(made) == 4
    assert len(set(made)) == 1


def test_what_would_come_back_as_another_model_is_not_saved(tmp_path: Any) -> None:
    model = GPT2LMHeadModel(tiny.config("gpt2"))
    hf_posenc.retrofit(model.transformer, "alibi")
    with pytest.raises(ValueError, match="Retrofit the whole"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="part of the model already has"):
        hf_posenc.retrofit(model, "rope")
    hf_posenc.restore(model.transformer)
    model.save_pretrained(tmp_path)

    set_too_late = GPT2LMHeadModel(tiny.config("gpt2"))
    set_too_late.config.position_scheme = "rope"
    with pytest.raises(ValueError, match="built without it"):
        set_too_late.save_pretrained(tmp_path)

    variant = GPT2LMHeadModel(tiny.config("gpt2", position_scheme="alibi"))
    for other in ("rope", None):
        variant.config.position_scheme = other
        with pytest.raises(ValueError, match=r"position_scheme"):
            variant.save_pretrained(tmp_path)
        if other:
            with pytest.raises(ValueError, match="built with 'alibi'"):
                variant(tiny.tokens())


def test_berts_with_a_config_of_another_kind_are_refused() -> None:
    from transformers import DPRConfig, DPRQuestionEncoder

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="DPRConfig"), hf_posenc.patched("alibi"):
        DPRQuestionEncoder(DPRConfig(**sizes, vocab_size=61))
    model = DPRQuestionEncoder(DPRConfig(**sizes, vocab_size=61))
    refused(model.question_encoder.bert_model, "alibi", "DPRConfig")


@pytest.mark.parametrize("scheme", [None, "alibi"])
def test_replicas_for_data_parallel(scheme: Any) -> None:
    GPT2Model(tiny.config("gpt2", position_scheme="rope"))  # from here on the redirect is in place
    model = tiny.model("gpt2", scheme)
    assert type(model._replicate_for_data_parallel()) is type(model)
    assert isinstance(type(model.config).__new__(type(model.config)), type(model.config))
