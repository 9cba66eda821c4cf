"""Metrics on windows of text: perplexity by length and position, order sensitivity, similarity of embeddings.

Shapes: B windows in a batch, N tokens in a window, W windows, S text segments, K position bins, E features.
"""

from __future__ import annotations

import math
import random
from functools import partial

import torch
from torch import nn

from ..errors import PosEncError
from .data import Windows, text_hash
from .models import EvaluatedModel
from .results import (
    EvaluationStopped,
    OrderResult,
    PerplexityResult,
    PositionResult,
    ShuffleResult,
    SimilarityResult,
    mean_estimate,
    perplexity_estimate,
)

MAX_EMBEDDED_WINDOWS = 512
MIN_WINDOWS_TO_CORRELATE = 3


def evaluate_perplexity(model: EvaluatedModel, length: int) -> PerplexityResult:
    """Perplexity on windows of one length, overall and by position within the window."""
    settings = model.settings
    if settings.stride is not None and not model.causal:
        raise PosEncError(f"stride requires a causal model, but {model.name} is a masked model: remove the stride")
    windows = model.windows(length, settings.stride)
    num_bins = min(settings.position_bins, length)
    edges = [length * index // num_bins for index in range(num_bins + 1)]
    bins_N = torch.bucketize(torch.arange(length), torch.tensor(edges[1:]), right=True)

    def bin_losses(indices: list[int]) -> list[torch.Tensor]:
        inputs_BN, targets_BN, scored_BN = model.prepare_inputs(windows, indices, windows.new_tokens(indices))
        losses_BN = model.token_losses(inputs_BN, targets_BN, scored_BN)
        zeros_B2K = torch.zeros(len(indices), 2, num_bins, dtype=torch.float64)
        return list(zeros_B2K.index_add(2, bins_N, torch.stack([losses_BN, scored_BN.double()], dim=1)))

    totals_W2K = torch.stack(model.map_batches(bin_losses, len(windows), length, "perplexity"))
    segments_W = windows.segments()
    zeros_S2K = torch.zeros(int(segments_W[-1]) + 1, 2, num_bins, dtype=torch.float64)
    sums_SK, counts_SK = zeros_S2K.index_add(0, segments_W, totals_W2K).unbind(1)
    sums_S, counts_S = sums_SK.sum(1), counts_SK.sum(1)
    perplexity = partial(perplexity_estimate, confidence=settings.confidence)
    return PerplexityResult(
        model=model.name,
        length=length,
        perplexity=perplexity(sums_S, counts_S),
        num_tokens=int(counts_S.sum()),
        num_windows=len(windows),
        positions=tuple(
            PositionResult(start, end, perplexity(bin_sums_S, bin_counts_S), int(bin_counts_S.sum()))
            for start, end, bin_sums_S, bin_counts_S in zip(edges, edges[1:], sums_SK.T, counts_SK.T, strict=False)
            if bin_counts_S.any()
        ),
        segment_losses=tuple(sums_S.tolist()),
        segment_tokens=tuple(counts_S.int().tolist()),
        text_hash=text_hash(model.token_ids),
    )


def evaluate_order(model: EvaluatedModel, length: int) -> OrderResult:
    """How much the loss grows when the context of the scored tokens is shuffled in blocks.

    A causal model is scored on the last token of each block, a masked model on masked tokens. These stay in place.
    """
    windows = model.windows(length)
    if windows.text_length < 3:
        raise EvaluationStopped(f"A window of {length} tokens is too short to shuffle")
    shuffles = tuple(_evaluate_shuffle(model, windows, size) for size in model.settings.shuffle_blocks)
    return OrderResult(model.name, length, shuffles=shuffles)


def _evaluate_shuffle(model: EvaluatedModel, windows: Windows, block_size: int | None) -> ShuffleResult:
    settings, text_mask_N = model.settings, windows.text_mask()
    size = windows.text_length if block_size is None else min(block_size + int(model.causal), windows.text_length)

    def losses(indices: list[int]) -> list[tuple[float, float, int]]:
        ends_BN = block_ends(text_mask_N, size).expand(len(indices), -1)
        inputs_BN, targets_BN, scored_BN = model.prepare_inputs(windows, indices, ends_BN)
        shuffled_BN = inputs_BN.clone()
        for row, index in enumerate(indices):
            seed = f"{settings.seed} {block_size} {index}"
            shuffled_BN[row] = inputs_BN[row, shuffle_positions(text_mask_N, scored_BN[row], size, seed)]
        ordered_B = model.token_losses(inputs_BN, targets_BN, scored_BN).sum(1)
        shuffled_B = model.token_losses(shuffled_BN, targets_BN, scored_BN).sum(1)
        return list(zip(ordered_B.tolist(), shuffled_B.tolist(), scored_BN.sum(1).tolist(), strict=True))

    description = f"order in blocks of {block_size or 'a window'}"
    results = model.map_batches(losses, len(windows), windows.length, description)
    ordered_W, shuffled_W, counts_W = torch.tensor(results, dtype=torch.float64).T
    return ShuffleResult(
        block_size,
        loss=mean_estimate(ordered_W, counts_W, settings.confidence),
        loss_increase=mean_estimate(shuffled_W - ordered_W, counts_W, settings.confidence),
        num_tokens=int(counts_W.sum()),
    )


def block_ends(text_mask_N: torch.Tensor, size: int) -> torch.Tensor:
    """The last token of each complete block of text, (N,)."""
    ends_N = torch.zeros_like(text_mask_N)
    ends_N[text_mask_N.nonzero()[:, 0][size - 1 :: size]] = True
    return ends_N


def shuffle_positions(text_mask_N: torch.Tensor, fixed_N: torch.Tensor, size: int, seed: str) -> torch.Tensor:
    """The position that each token is taken from, (N,): shuffled within blocks of text, except for fixed positions."""
    generator = random.Random(seed)
    order_N = torch.arange(len(text_mask_N))
    for block in text_mask_N.nonzero()[:, 0].split(size):
        free = block[~fixed_N[block]].tolist()
        order_N[free] = torch.tensor(generator.sample(free, len(free)), dtype=torch.long)
    return order_N


def evaluate_similarity(model: EvaluatedModel, length: int, reference: EvaluatedModel) -> SimilarityResult:
    """Compare mean-pooled embeddings of windows of one length."""
    if not torch.equal(model.token_ids, reference.token_ids):
        raise PosEncError(
            f"{model.name} and {reference.name} tokenize the text differently: similarity requires the same tokenizer"
        )
    windows = model.windows(length)
    embeddings_WE = _embed(model, windows)
    try:
        reference_WE = _embed(reference, windows)
    except EvaluationStopped as error:
        raise EvaluationStopped(f"Reference model {reference.name}: {error.reason}", error.permanent) from error
    cosines_W = nn.functional.cosine_similarity(embeddings_WE, reference_WE)
    mean = mean_estimate(cosines_W, torch.ones_like(cosines_W), model.settings.confidence)
    enough = len(cosines_W) >= MIN_WINDOWS_TO_CORRELATE
    return SimilarityResult(
        model=model.name,
        length=length,
        reference=reference.name,
        cosine=mean.map(lambda cosine: min(max(cosine, -1.0), 1.0)),
        correlation=similarity_correlation(embeddings_WE, reference_WE) if enough else None,
        num_windows=len(cosines_W),
    )


def _embed(model: EvaluatedModel, windows: Windows) -> torch.Tensor:
    """The mean of the last hidden states of each window, (W, E)."""

    def mean_states(indices: list[int]) -> list[torch.Tensor]:
        return list(model.hidden_states(windows.input_ids(indices)).double().mean(1).cpu())

    num_windows = min(len(windows), MAX_EMBEDDED_WINDOWS)
    return torch.stack(model.map_batches(mean_states, num_windows, windows.length, "embeddings"))


def similarity_correlation(first_WE: torch.Tensor, second_WE: torch.Tensor) -> float | None:
    """Pearson correlation of the cosines between all pairs of windows; None if they are all the same."""
    pairs = torch.triu_indices(len(first_WE), len(first_WE), offset=1)
    units = (nn.functional.normalize(embeddings_WE, dim=-1) for embeddings_WE in (first_WE, second_WE))
    cosines = torch.stack([(unit_WE @ unit_WE.T)[pairs[0], pairs[1]] for unit_WE in units])
    correlation = torch.corrcoef(cosines)[0, 1].item()
    return None if math.isnan(correlation) else correlation
