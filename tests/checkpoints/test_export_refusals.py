"""What has no stock equal is refused with the schemes that do, and a failed export leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.checkpoints import files, weights
from hf_posenc.checkpoints.export import gpt_neox, position_table, run
from hf_posenc.registry import SCHEMES
from tests.checkpoints.stock_checkpoints import file_hashes, save_stock, update_json
from tests.support import exports
from tests.support import tiny_models as tiny

REFUSED = {
    "resonance": ("llama", {"type": "rope", "resonance": True}, "resonance and fourier change"),
    "fourier without a gain": ("llama", {"type": "rope", "fourier": 0.0}, "resonance and fourier change"),
    "llama-alibi": ("llama", "alibi", "(?s)alibi changes the attention scores.*can be exported.*`rope` in all layers"),
    "llama-xpos": ("llama", "xpos", "xpos is not a plain rotation"),
    "llama-learned": ("llama", "learned", "acts at the input embedding"),
    "llama-partial-scaled": (
        "llama",
        exports.rope(partial_rotary_factor=0.5, scaling={"rope_type": "linear", "factor": 2.0}),
        "phi3 is exported without scaling",
    ),
    "mistral-partial": ("mistral", exports.rope(partial_rotary_factor=0.5), "always rotates whole heads"),
    "llama-two-angles": (
        "llama",
        [exports.rope(layers=[0]), exports.rope(layers=[1, 2], theta=500.0)],
        "layers rotate by different angles",
    ),
    "gpt2-some-layers": ("gpt2", exports.rope(layers=[0]), "layer 1 has no rotation"),
    "gpt2-concat": ("gpt2", {"type": "sinusoidal", "mix": "concat"}, "does more than add"),
    "gpt2-kerple": ("gpt2", "kerple", "(?s)kerple acts inside attention.*gpt_neox"),
    "bert-t5-buckets": ("bert", {"type": "t5", "num_buckets": 8, "max_distance": 20}, "mpnet has 32 buckets"),
    "bert-t5-per-layer": ("bert", {"type": "t5", "shared": False}, "one bias for all layers"),
    "bert-dynamic": ("bert", exports.scaling("dynamic"), "one table of angles"),
    "bert-deberta-some-layers": ("bert", {**exports.DEBERTA_V2, "layers": [0]}, "acts in some layers only"),
    "bert-decoder-rope": ("bert-decoder", "rope", "roformer has no head that equals BertLMHeadModel"),
    "bert-shaw": ("bert", {"type": "shaw", "max_distance": 4}, "(?s)shaw acts inside attention.*deberta-v2"),
    "qwen3-none": ("qwen3", "none", "no layer has a rotation"),
}


FAST = ("llama-alibi", "gpt2-concat", "bert-t5-buckets")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in REFUSED]
)
def test_schemes_without_a_stock_equal(name: str, tmp_path: Path) -> None:
    architecture, scheme, match = REFUSED[name]
    exports.save(tmp_path / "variant", architecture, scheme)
    with pytest.raises(PosEncError, match=match) as refusal:
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "a" / "stock")
    assert f"Schemes of {architecture.removesuffix('-decoder')} that can be exported" in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


def documented_targets() -> dict[str, list[str]]:
    """From docs/deploying.md, by scheme: what it is exported as on GPT-2, BERT and LLaMA."""
    page = Path(__file__).parents[2].joinpath("docs", "deploying.md").read_text(encoding="utf-8")
    table = page.split("| scheme | GPT-2 | BERT | LLaMA |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {
        name.strip(" `"): [cell.strip("`") for cell in cells] for names, *cells in rows for name in names.split(",")
    }


def test_every_scheme_is_documented() -> None:
    ours = {name for name, scheme in SCHEMES.items() if scheme.__module__.startswith("hf_posenc.")}
    assert set(documented_targets()) == ours


@pytest.mark.slow
@pytest.mark.parametrize("scheme", documented_targets())
def test_documented_exports(scheme: str, tmp_path: Path) -> None:
    for architecture, target in zip(("gpt2", "bert", "llama"), documented_targets()[scheme], strict=True):
        variant = tmp_path / architecture
        try:
            exports.save(variant, architecture, scheme)
        except PosEncError as error:  # some schemes do not work in encoders
            assert (architecture, target) == ("bert", "no"), error
            continue
        if target == "no":
            with pytest.raises(PosEncError, match="No stock model"):
                hf_posenc.export_checkpoint(variant, tmp_path / f"{architecture}-stock")
        else:
            export = hf_posenc.export_checkpoint(variant, tmp_path / f"{architecture}-stock")
            assert export.model_type == target


def test_a_token_that_mpnet_takes_for_padding(tmp_path: Path) -> None:
    exports.save(tmp_path / "variant", "bert", "t5")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "a": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    words.save_pretrained(tmp_path / "variant")
    with pytest.raises(PosEncError, match=r"mpnet takes token id 1 for padding.*'\[UNK\]'"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")


def test_stock_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(PosEncError, match="stock checkpoint"):
        hf_posenc.export_checkpoint(save_stock(tmp_path / "source"), tmp_path / "stock")


@pytest.mark.slow
def test_settings_that_the_target_does_not_have(tmp_path: Path) -> None:
    tiny.model("gpt2", "rope", torch.float32, scale_attn_by_inverse_layer_idx=True).save_pretrained(
        tmp_path / "variant"
    )
    with pytest.raises(PosEncError, match="scales attention"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    tiny.model("bert", ["learned", "t5"], torch.float32, hidden_act="relu").save_pretrained(tmp_path / "bert")
    with pytest.raises(PosEncError, match="the activation gelu, not relu"):
        hf_posenc.export_checkpoint(tmp_path / "bert", tmp_path / "stock")


def test_quantized_variants_and_adapters(tmp_path: Path) -> None:
    exports.save(tmp_path / "variant", "gpt2", "rope")
    update_json(tmp_path / "variant" / "config.json", quantization_config={"quant_method": "torchao"})
    with pytest.raises(PosEncError, match="before quantization"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "scheme", "match"),
    [
        ("gpt2", "learned", "max_positions=64 is longer than the 48 positions of learned"),
        ("llama", exports.scaling("dynamic"), "max_positions cannot be set"),
        ("llama", exports.scaling("yarn"), "max_positions cannot be set"),
    ],
)
def test_max_positions_that_cannot_be_had(architecture: str, scheme: Any, match: str, tmp_path: Path) -> None:
    exports.save(tmp_path / "variant", architecture, scheme)
    with pytest.raises(PosEncError, match=match):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", max_positions=64)
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


def test_a_wrong_export_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values in GPT-2's order would load, and give nonsense."""
    exports.save(tmp_path / "variant", "gpt2", "rope")
    monkeypatch.setattr(gpt_neox, "_by_head", lambda fused, order, num_heads: fused.t())
    with pytest.raises(PosEncError, match="does not compute what .* computes"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]
    assert hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", verify=False).verification is None


@pytest.mark.slow
@pytest.mark.parametrize("row", [-1, 0], ids=["last row", "first row"])
def test_a_wrong_table_is_noticed(row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long table is compared at its end too, which the compared texts do not reach."""
    exports.save(tmp_path / "variant", "gpt2", "sinusoidal")
    original = position_table.added_rows

    def perturbed(*args: Any) -> torch.Tensor:
        rows = original(*args)
        rows[row, 0] += 0.1  # one feature: a norm would cancel a change of all
        return rows

    monkeypatch.setattr(position_table, "added_rows", perturbed)
    with pytest.raises(PosEncError, match="does not compute"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock", max_positions=1000)


STEPS = [
    (weights, "_rewrite"),
    (weights, "save_file"),
    (run, "verify_tokenizer"),
    (run, "verify_export"),
    (files, "flush"),
    (Path, "replace"),
    (shutil, "copyfile"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_failure_at_any_step_leaves_nothing_behind(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports.save(tmp_path / "variant", "gpt2", "rope")
    before = file_hashes(tmp_path / "variant")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, fail)
    verify = name.startswith("verify")
    with pytest.raises(PosEncError, match="No space left"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "a" / "b" / "stock", verify=verify)
    assert file_hashes(tmp_path / "variant") == before
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]
