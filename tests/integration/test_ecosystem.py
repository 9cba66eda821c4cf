"""Variants in the ecosystem: generate, pipelines, Trainer, PEFT, resizing, recorded outputs, cross-attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny
from tests.support.cases import CASES, DECODERS, Case, pairs

COMMON = [case for case in CASES if case.id in ("rope", "t5", "alibi", "sinusoidal", "learned", "alternating")]
GENERATION = {"max_new_tokens": 7, "eos_token_id": None}


def padded_prompt() -> dict[str, torch.Tensor]:
    ids = tiny.tokens(2, 8)
    ids[0, :3] = tiny.PAD
    return {"input_ids": ids, "attention_mask": (ids != tiny.PAD).long()}


def greedy_without_a_cache(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pairs(DECODERS, COMMON, cache=["dynamic", "static"])
def test_greedy_generation_equals_each_row_alone_without_a_cache(case: Case, architecture: str, cache: str) -> None:
    model, prompt = tiny.model(architecture, case.scheme), padded_prompt()
    settings = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    generated = model.generate(**prompt, do_sample=False, **GENERATION, **settings)
    for row, start in ((0, 3), (1, 0)):
        alone = greedy_without_a_cache(model, prompt["input_ids"][row : row + 1, start:], 7)
        assert torch.equal(generated[row, start:], alone[0])


@pairs(DECODERS, COMMON)
def test_beam_search_equals_beam_search_without_a_cache(case: Case, architecture: str) -> None:
    """Reordering beams in the cache keeps their positions; padding makes the rows differ in them."""
    model, prompt = tiny.model(architecture, case.scheme), padded_prompt()
    settings = {
        "num_beams": 3,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        **GENERATION,
    }
    cached = model.generate(**prompt, **settings)
    expected = model.generate(**prompt, use_cache=False, **settings)
    assert torch.equal(cached.sequences, expected.sequences)
    torch.testing.assert_close(cached.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-5)


@pairs(["gpt2", "llama"], COMMON)
def test_sampling_and_assisted_generation(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens(1, 8)
    torch.manual_seed(0)
    first = model.generate(ids, do_sample=True, top_k=5, **GENERATION)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, do_sample=True, top_k=5, **GENERATION), first)
    assistant = tiny.model(architecture, case.scheme, torch.float32, seed=3)
    expected = model.generate(ids, do_sample=False, **GENERATION)
    assert torch.equal(model.generate(ids, do_sample=False, assistant_model=assistant, **GENERATION), expected)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {
        word: index for index, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcdefghijklmnop"])
    }
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", eos_token="[SEP]"
    )


@pytest.mark.parametrize(
    ("architecture", "task"), [("gpt2", "text-generation"), ("llama", "text-generation"), ("bert", "fill-mask")]
)
def test_pipelines_load_a_saved_variant(
    architecture: str, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.model(architecture, "alibi", torch.float32).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"] == [5, 6]
    run = pipeline(task, model=str(tmp_path))
    assert type(run.model).__name__.startswith("PosEnc")
    result = run(
        "a b [MASK] d" if task == "fill-mask" else "a b c", **({} if task == "fill-mask" else {"max_new_tokens": 3})
    )
    assert result
    assert "not supported" not in caplog.text


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tiny.tokens(1, 10, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    return TrainingArguments(**{**settings, **changes})


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("gpt2", "t5"),
        pytest.param("llama", ["rope", {"type": "alibi", "learned": True}], marks=pytest.mark.slow),
    ],
)
def test_trainer_trains_the_scheme_and_resumes_to_the_same_weights(
    architecture: str, scheme: Any, tmp_path: Path
) -> None:
    def fresh() -> Any:
        return tiny.model(architecture, scheme, torch.float32)

    start = {name: tensor.clone() for name, tensor in fresh().state_dict().items()}
    whole = Trainer(fresh(), arguments(tmp_path / "whole"), train_dataset=Rows())
    whole.train()
    moved = [name for name, tensor in whole.model.state_dict().items() if not torch.equal(tensor, start[name])]
    assert any("position_scheme" in name for name in moved)
    resumed = Trainer(fresh(), arguments(tmp_path / "whole"), train_dataset=Rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert type(loaded) is type(whole.model)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in whole.model.state_dict().items())


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_label_smoothing_shifts_the_labels_as_for_stock(architecture: str, tmp_path: Path) -> None:
    """Trainer decides by class name whether to shift the labels, so it must recognize the variant's class."""
    losses = []
    for scheme in (None, "learned" if architecture == "gpt2" else "rope"):
        model = tiny.model(architecture, scheme, torch.float32)
        trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=0.2), train_dataset=Rows())
        batch = {name: torch.stack([Rows()[row][name] for row in range(4)]) for name in ("input_ids", "labels")}
        losses.append(trainer.compute_loss(model, batch).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_scheme_modules_can_be_wrapped() -> None:
    """PEFT's modules_to_save and compilers wrap modules; the scheme must still be called through the wrapper."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, ids = tiny.model("gpt2", "t5", torch.float32), tiny.tokens()
    expected = model(ids).logits
    settings = peft.LoraConfig(r=2, fan_in_fan_out=True, modules_to_save=["position_scheme.0"])
    wrapped = peft.get_peft_model(model, settings).eval()
    torch.testing.assert_close(wrapped(ids).logits, expected, rtol=0, atol=1e-6)
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert any("position_scheme" in name for name in trained)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_lora_with_default_target_modules(architecture: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, ids = tiny.model(architecture, "t5", torch.float32), tiny.tokens()
    stock = peft.get_peft_model(tiny.model(architecture, None, torch.float32), peft.LoraConfig(r=2))
    lora = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, init_lora_weights=False)).eval()
    assert {name for name, _ in lora.named_parameters() if "lora" in name} == {
        name for name, _ in stock.named_parameters() if "lora" in name
    }
    with torch.no_grad():
        expected = lora(ids).logits
        assert not torch.equal(expected, model(ids).logits)
        lora.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(lora.merge_and_unload()(ids).logits, expected, rtol=0, atol=1e-4)


@pairs(["bert", "gpt2", "llama"], COMMON)
def test_resizing_the_vocabulary(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens()
    with torch.no_grad():
        expected = model(ids).logits
        model.resize_token_embeddings(tiny.VOCABULARY + 5)
        assert torch.equal(model(ids).logits[..., : tiny.VOCABULARY], expected)


@pairs(["bert", "gpt2", "llama"], COMMON)
def test_attentions_and_hidden_states_are_recorded(case: Case, architecture: str) -> None:
    model, ids = tiny.model(architecture, case.scheme, torch.float32), tiny.tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(output.attentions) == tiny.LAYERS
    assert len(output.hidden_states) == tiny.LAYERS + 1
    for attention in output.attentions:
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, tiny.HEADS, 12), rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_alibi_shows_in_the_attentions(architecture: str) -> None:
    with_scheme, without = (tiny.model(architecture, scheme, torch.float32) for scheme in ("alibi", "none"))
    ids = tiny.tokens(1, 30)
    for model in (with_scheme, without):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        near = [
            model(ids, output_attentions=True).attentions[0][0, 0, -1, -3:].sum() for model in (with_scheme, without)
        ]
    assert near[0] > near[1] + 0.2


@pairs(["bert-decoder", "gpt2"], COMMON, backend=["sdpa", "eager"], cached=[False, True])
def test_schemes_leave_cross_attention_alone(case: Case, architecture: str, backend: str, cached: bool) -> None:
    """Shuffling the encoder's hidden states changes nothing, whatever the scheme."""
    model = tiny.model(architecture, case.scheme, add_cross_attention=True)
    model.set_attn_implementation(backend)
    encoded = torch.randn(2, 9, tiny.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, order = tiny.tokens(2, 10), torch.randperm(9, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids, encoder_hidden_states=encoded, use_cache=False).logits
        shuffled = model(ids, encoder_hidden_states=encoded[:, order], use_cache=False).logits
        torch.testing.assert_close(shuffled, expected, rtol=0, atol=1e-10)
        assert (model(ids, encoder_hidden_states=2 * encoded).logits - expected).abs().max() > 1e-3
        if cached:
            cache, steps = None, []
            for start, stop in ((0, 4), (4, 5), (5, 9), (9, 10)):
                output = model(ids[:, start:stop], encoder_hidden_states=encoded, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                steps.append(output.logits)
            torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-10)


@pairs(["bert", "gpt2", "llama"], [case for case in CASES if case.scores])
def test_flash_refuses_a_score_term_by_name(case: Case, architecture: str) -> None:
    model = tiny.model(architecture, case.scheme, torch.float32)
    expected = model(tiny.tokens()).logits
    with pytest.raises(PosEncError, match=r"flash_attention_2.*score.*'sdpa', 'eager', 'flex_attention'"):
        model.set_attn_implementation("flash_attention_2")
    assert torch.equal(model(tiny.tokens()).logits, expected)
    config = tiny.config(architecture, position_scheme=case.scheme, attn_implementation="flash_attention_2")
    with pytest.raises(PosEncError, match="flash_attention_2"):
        tiny.MODEL_CLASSES[architecture](config)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_flex_refuses_a_value_term_by_name(architecture: str) -> None:
    model = tiny.model(architecture, "shaw", torch.float32)
    with pytest.raises(PosEncError, match=r"flex_attention.*value.*'shaw'.*'sdpa', 'eager'"):
        model.set_attn_implementation("flex_attention")
    tiny.model(architecture, {"type": "shaw", "values": False}).set_attn_implementation("flex_attention")


def test_flash_attention_gets_rotated_states_and_the_real_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a mock records what flash attention would get under a rotation."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: list[Any] = []

    def mock_flash_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((module.config._attn_implementation, kwargs.get("position_ids"), mask))
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=module.is_causal)
        return output.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", mock_flash_attention)
    model, ids = tiny.model("llama", "rope", torch.float32), tiny.tokens()
    with torch.no_grad():
        expected = model(ids).logits
        model.config._attn_implementation_internal = "flash_attention_2"
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    assert seen[0] == ("flash_attention_2", None, None)
    gaps = torch.arange(12)[None] * 2
    model(ids, position_ids=gaps)
    assert seen[-1][1] is None  # flash attention would treat the gaps as document boundaries
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None]
    model(ids[:1], position_ids=packed)
    assert torch.equal(seen[-1][1], packed)
    with pytest.raises(PosEncError, match="single row|one row"):
        model(ids, position_ids=packed.expand(2, -1))


def test_inputs_that_a_cache_cannot_represent_are_rejected() -> None:
    model, ids = tiny.model("gpt2", "t5"), tiny.tokens(1, 8)
    packed = torch.cat([torch.arange(4), torch.arange(4)])[None]
    cache = model(ids, position_ids=packed, use_cache=True).past_key_values
    with pytest.raises(PosEncError, match="document"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    cache = model(ids, position_ids=torch.arange(8)[None] * 3, use_cache=True).past_key_values
    with pytest.raises(PosEncError, match="use_cache=False"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    cache = model(ids[:, :4], position_ids=torch.arange(4)[None], use_cache=True).past_key_values
    with pytest.raises(PosEncError, match="cached|continue"):
        model(ids[:, 4:5], position_ids=torch.tensor([[14]]), past_key_values=cache, use_cache=True)
    with pytest.raises(PosEncError, match="attention_mask"):
        model(
            ids[:, 4:5],
            attention_mask=torch.ones(1, 1),
            position_ids=torch.tensor([[4]]),
            past_key_values=cache,
            use_cache=True,
        )
    with pytest.raises(PosEncError, match="continuous batching"):
        model(ids, cache=object())
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(ids, position_ids=packed, past_key_values=cache, use_cache=True)
    cache.reset()
    assert model(ids, past_key_values=cache, use_cache=True).logits.isfinite().all()
    rotating = hf_posenc.retrofit(tiny.model("gpt2"), "rope")
    gaps = torch.tensor([[0, 2, 4, 6, 8, 10, 12, 14, 16]])
    nine = tiny.tokens(1, 9)
    cache = rotating(nine[:, :8], position_ids=gaps[:, :8], use_cache=True).past_key_values
    step = rotating(nine[:, 8:], position_ids=gaps[:, 8:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(step[:, 0], rotating(nine, position_ids=gaps).logits[:, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_scaling_rejects_a_cache_past_that_length(kind: str) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model, ids = tiny.model("llama", {"type": "rope", "scaling": scaling}), tiny.tokens(1, tiny.TRAINED_LENGTH + 4)
    cache = model(ids[:, : tiny.TRAINED_LENGTH], use_cache=True).past_key_values
    if kind == "longrope":  # if the prompt is already past it, the angles stay fixed and a cache is fine
        past = model(ids[:, :-2], use_cache=True).past_key_values
        step = model(ids[:, -2:], past_key_values=past, use_cache=True).logits
        torch.testing.assert_close(step, model(ids, use_cache=False).logits[:, -2:], rtol=0, atol=3e-6)
    with pytest.raises(PosEncError, match=r"use_cache=False.*yarn"):
        model(ids[:, tiny.TRAINED_LENGTH :], past_key_values=cache, use_cache=True)
    assert model(ids, use_cache=False).logits.isfinite().all()


def test_layers_cannot_be_called_without_the_model() -> None:
    model = tiny.model("gpt2", "alibi", torch.float32)
    with pytest.raises(PosEncError, match="positions"):
        model.transformer.h[0](torch.zeros(1, 3, tiny.WIDTH))
    stock = tiny.model("gpt2", None, torch.float32)
    stock.config._attn_implementation_internal = "hf_posenc"
    with pytest.raises(PosEncError, match="hf_posenc"):
        stock(tiny.tokens())
