"""Models and texts to analyze; every scheme can be analyzed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_posenc
from hf_posenc import PosEncError, analysis
from tests.support.cases import CASES, Case
from tests.support.tiny_models import TRAINED_LENGTH, WIDTH, model, tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_scheme_can_be_analyzed(case: Case) -> None:
    """Each analysis gives finite numbers or explains that the scheme has nothing of the kind."""
    subject = analysis.build_model(case.scheme, hidden_size=32, num_heads=4, num_layers=3, max_positions=48)
    results = []
    for measure in (
        analysis.position_embeddings,
        analysis.relative_buckets,
        analysis.bias_by_distance,
        analysis.rotary_decay,
    ):
        try:
            results.append(measure(subject, 24))
        except PosEncError as error:
            assert str(error)
    assert results or case.id in ("none", "cope", "forget") or case.remaps
    results.append(analysis.attention_by_distance(subject, tokens(1, 24) % 32))
    for result in results:
        assert str(result)
        for value in vars(result).values():
            assert not isinstance(value, torch.Tensor) or value.double().isfinite().all()


def test_checkpoints(tmp_path: Path) -> None:
    model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    model("gpt2", "t5", dtype=torch.float32).save_pretrained(tmp_path / "variant")
    stock = analysis.load_model(tmp_path / "stock")
    assert analysis.position_embeddings(stock, 48).table.shape == (TRAINED_LENGTH, WIDTH)
    assert analysis.bias_by_distance(analysis.load_model(tmp_path / "variant"), 9).values.any()
    assert analysis.bias_by_distance(analysis.load_model(tmp_path / "stock", "alibi"), 9).values.any()
    with pytest.raises(PosEncError, match="nowhere"):
        analysis.load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="48 positions"):
        analysis.position_embeddings(stock, TRAINED_LENGTH + 1)


def test_incomplete_checkpoints_are_rejected(tmp_path: Path) -> None:
    subject = model("gpt2", dtype=torch.float32)
    weights = {name: tensor for name, tensor in subject.state_dict().items() if "h.1.attn.c_attn" not in name}
    subject.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(PosEncError, match=r"h\.1\.attn\.c_attn"):
        analysis.load_model(tmp_path)


def test_public_names() -> None:
    assert hf_posenc.analysis is analysis
    assert set(analysis.__all__) <= set(dir(analysis))
    with pytest.raises(PosEncError, match="multiple"):
        analysis.build_model("rope", hidden_size=10, num_heads=4)
