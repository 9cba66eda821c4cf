"""Similarity of a model's embeddings to those of a reference model on the same text.

Shapes: W windows, E features.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..errors import PosEncError
from .data import Windows, split_windows
from .distributed import ProcessGroup
from .models import EvaluatedModel
from .results import EvaluationStopped, SimilarityResult, mean_estimate
from .settings import EvaluationSettings

MAX_WINDOWS = 512
MIN_WINDOWS_TO_CORRELATE = 3


def evaluate_similarity(
    model: EvaluatedModel, length: int, settings: EvaluationSettings, group: ProcessGroup, reference: EvaluatedModel
) -> SimilarityResult:
    """Compare mean-pooled embeddings of windows of one length."""
    if not torch.equal(model.token_ids, reference.token_ids):
        raise PosEncError(
            f"{model.name} and {reference.name} tokenize the text differently: similarity requires the same tokenizer"
        )
    windows = split_windows(model.token_ids, model.special_tokens, length)
    embeddings_WE = embed(model, windows, settings, group)
    try:
        reference_WE = embed(reference, windows, settings, group)
    except EvaluationStopped as error:
        raise EvaluationStopped(f"Reference model {reference.name}: {error.reason}", error.permanent) from error
    cosines_W = nn.functional.cosine_similarity(embeddings_WE, reference_WE)
    mean = mean_estimate(cosines_W, torch.ones_like(cosines_W), settings.confidence)
    enough = len(cosines_W) >= MIN_WINDOWS_TO_CORRELATE
    return SimilarityResult(
        model=model.name,
        length=length,
        reference=reference.name,
        cosine=mean.map(lambda cosine: min(max(cosine, -1.0), 1.0)),
        correlation=similarity_correlation(embeddings_WE, reference_WE) if enough else None,
        num_windows=len(cosines_W),
    )


def embed(model: EvaluatedModel, windows: Windows, settings: EvaluationSettings, group: ProcessGroup) -> torch.Tensor:
    """The mean of the last hidden states of each window, (W, E)."""

    def mean_states(indices: list[int]) -> list[torch.Tensor]:
        return list(model.hidden_states(windows.input_ids(indices)).double().mean(1).cpu())

    description = f"{model.name}: embeddings at {windows.length} tokens"
    num_windows, batch_size = min(len(windows), MAX_WINDOWS), settings.batch_size(windows.length)
    return torch.stack(group.map_batches(mean_states, num_windows, batch_size, description))


def similarity_correlation(first_WE: torch.Tensor, second_WE: torch.Tensor) -> float | None:
    """Pearson correlation of the cosines between all pairs of windows; None if they are all the same."""
    pairs = torch.triu_indices(len(first_WE), len(first_WE), offset=1)
    units = (nn.functional.normalize(embeddings_WE, dim=-1) for embeddings_WE in (first_WE, second_WE))
    cosines = torch.stack([(unit_WE @ unit_WE.T)[pairs[0], pairs[1]] for unit_WE in units])
    correlation = torch.corrcoef(cosines)[0, 1].item()
    return None if math.isnan(correlation) else correlation
