"""Similarity of embeddings to a reference model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertModel

import hf_posenc
from hf_posenc.evaluation.metrics import evaluate_similarity, similarity_correlation
from tests.support import tiny_models as tiny
from tests.support.evaluation import BOS, EOS, evaluated_model, make_tokenizer, random_ids


def test_similarity_matches_a_plain_loop() -> None:
    tokenizer, token_ids = make_tokenizer(), random_ids(300)
    first, second = tiny.model("bert"), tiny.model("bert", "none")
    reference = evaluated_model(first, token_ids, tokenizer, causal=False)
    same = evaluate_similarity(reference, 40, reference)
    assert same.cosine is not None
    assert (same.cosine.value, same.correlation, same.num_windows) == (pytest.approx(1), pytest.approx(1), 7)
    assert same.cosine.confidence_interval[1] <= 1
    other = evaluated_model(second, token_ids, tokenizer, causal=False, batch_tokens=90)
    result = evaluate_similarity(other, 40, reference)
    cosines = []
    for start in range(0, 300 - 38 + 1, 38):
        window = torch.tensor([[BOS, *token_ids[start : start + 38].tolist(), EOS]])
        with torch.no_grad():
            embeddings = [model.bert(window).last_hidden_state[0].mean(0) for model in (first, second)]
        cosines.append(nn.functional.cosine_similarity(*embeddings, dim=0).item())
    assert result.cosine is not None
    assert result.cosine.value == pytest.approx(sum(cosines) / len(cosines))
    assert result.cosine.value < 0.999


def test_correlation_ignores_rotations() -> None:
    generator = torch.Generator().manual_seed(0)
    points, others, matrix = (torch.randn(*size, generator=generator).double() for size in ((12, 8), (12, 8), (8, 8)))
    rotation, _ = torch.linalg.qr(matrix)
    assert similarity_correlation(points, points @ rotation) == pytest.approx(1)
    assert abs(similarity_correlation(points, others)) < 0.6
    identical = torch.ones(4, 3, dtype=torch.float64)
    assert similarity_correlation(identical, others[:4, :3]) is None  # JSON has no NaN


def test_a_reference_that_stops_is_named() -> None:
    report = hf_posenc.evaluate(
        {"variant": tiny.model("bert", "alibi")},
        random_ids(300),
        reference=tiny.model("bert"),
        tokenizer=make_tokenizer(),
        metrics=["similarity"],
        lengths=["1x", "2x"],
        progress=False,
    )
    first, second = report.similarity
    assert first.cosine is not None
    assert (first.reference, first.stopped) == ("reference", None)
    assert second.stopped is not None
    assert "Reference model reference" in second.stopped.reason
    assert "cosine" in str(report)


def test_a_model_without_a_head_has_embeddings_only() -> None:
    model = BertModel(tiny.config("bert")).eval()
    metrics = ["perplexity", "similarity"]
    report = hf_posenc.evaluate(
        model, random_ids(100), metrics=metrics, lengths=[20], tokenizer=make_tokenizer(), progress=False
    )
    assert report.perplexity[0].stopped is not None
    assert "head" in report.perplexity[0].stopped.reason
    assert report.similarity[0].cosine is not None
