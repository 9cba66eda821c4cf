"""The metrics: perplexity by length and position, passkey retrieval, order sensitivity, similarity of embeddings.

Shapes: B windows or passkey trials in a batch, N tokens in each, W windows, S text segments, K position bins or tokens
of a key, P scored tokens in a batch, V vocabulary entries, E features.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..errors import PosEncError
from .data import Windows, text_hash
from .models import EvaluatedModel
from .results import (
    DepthResult,
    EvaluationStopped,
    OrderResult,
    PasskeyResult,
    PerplexityResult,
    PositionResult,
    ShuffleResult,
    SimilarityResult,
    check_finite,
    mean_estimate,
    perplexity_estimate,
    proportion_estimate,
)

QUESTION, FULL_STOP = " The secret number is", "."
NUMBERS, TOKENS = "numbers", "tokens"
DIGITS_PER_KEY, TOKENS_PER_KEY = 5, 4
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


class PasskeyTrial(NamedTuple):
    """Input ids that end in the key, a random key that is not in the text, and the first token where the two differ."""

    input_ids: list[int]
    key: list[int]
    distractor: list[int]
    divergence: int


class TrialOutcome(NamedTuple):
    """How a model did in one trial. `preferred` is 1 or 0, or 0.5 for a tie, which is common in bfloat16."""

    exact_match: bool
    preferred: float
    log_rank_sum: float
    log_prob_sum: float
    num_tokens: int


class PasskeyPrompt:
    """Builds trials from a text. `key_type` is "numbers", or "tokens" if the tokenizer cannot represent numbers."""

    def __init__(self, model: EvaluatedModel) -> None:
        self.tokenizer, self.token_ids = model.tokenizer, model.token_ids
        self.prefix = list(model.special_tokens.prefix)
        self.question, self.full_stop = self._encode(QUESTION), self._encode(FULL_STOP)
        if not self.question:  # no tokenizer, or one that drops these words
            self.tokenizer, self.question = None, self.token_ids[: len(QUESTION.split())].tolist()
            self.full_stop = self.question[:1]
        first = 10 ** (DIGITS_PER_KEY - 1)
        samples = {tuple(self._encode(f" {number}")) for number in range(first, first + 20)}
        is_known = self.tokenizer is not None and not any(self.tokenizer.unk_token_id in ids for ids in samples)
        self.key_type = NUMBERS if is_known and len(samples) == 20 else TOKENS

    def _encode(self, text: str) -> list[int]:
        return [] if self.tokenizer is None else list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def trial(self, length: int, depth: float, seed: str) -> PasskeyTrial:
        """A trial of `length` tokens with the key at a depth from 0 (start) to 1 (end)."""
        generator = random.Random(seed)
        key, divergence = self._random_key(generator), None
        while divergence is None:
            distractor = self._random_key(generator)
            pairs = enumerate(zip(key, distractor, strict=False))
            divergence = next((index for index, (token, other) in pairs if token != other), None)
        needle = [*self.question, *key, *self.full_stop]
        room = length - len(self.prefix) - len(needle) - len(self.question) - len(key)
        if room < 0:
            raise EvaluationStopped(f"{length} tokens are too few for a passkey and its question: use {length - room}")
        positions = (torch.arange(room) + generator.randrange(len(self.token_ids))) % len(self.token_ids)
        filler = self.token_ids[positions].tolist()
        start = round(depth * room)
        input_ids = [*self.prefix, *filler[:start], *needle, *filler[start:], *self.question, *key]
        return PasskeyTrial(input_ids, key, distractor, divergence)

    def _random_key(self, generator: random.Random) -> list[int]:
        if self.key_type == NUMBERS:
            return self._encode(f" {generator.randrange(10 ** (DIGITS_PER_KEY - 1), 10**DIGITS_PER_KEY)}")
        return [int(self.token_ids[generator.randrange(len(self.token_ids))]) for _ in range(TOKENS_PER_KEY)]


def evaluate_passkey(model: EvaluatedModel, length: int) -> PasskeyResult:
    """Hide a key at several depths of a text, ask for it at the end, and score the answer.

    Greedy decoding reproduces the key exactly if each of its tokens is the model's first choice after those before it,
    so one forward pass over the text and the key decides. Small models rarely get there; whether they prefer the key to
    a random one, and its rank, show what they retain.
    """
    settings = model.settings
    if not model.causal:
        raise EvaluationStopped("Passkey retrieval requires a causal model")
    if len(model.token_ids.unique()) < 2:
        raise EvaluationStopped("The text repeats a single token, so no two passkeys would differ: use another text")
    prompt, num_trials = PasskeyPrompt(model), settings.passkey_trials
    cases = [(depth, trial) for depth in settings.passkey_depths for trial in range(num_trials)]

    def outcomes(indices: list[int]) -> list[TrialOutcome]:
        chosen = [cases[index] for index in indices]
        return run_trials(model, [prompt.trial(length, case[0], f"{settings.seed} {length} {case}") for case in chosen])

    results = model.map_batches(outcomes, len(cases), length, "passkey")
    depths = []
    for number, depth in enumerate(settings.passkey_depths):
        trials = results[number * num_trials :][:num_trials]
        matches, preferred, log_ranks, log_probs, num_tokens = map(sum, zip(*trials, strict=True))
        accuracy = proportion_estimate(matches, num_trials, settings.confidence)
        preference = proportion_estimate(preferred, num_trials, settings.confidence)
        rank = math.exp(log_ranks / num_tokens)
        depths.append(DepthResult(depth, num_trials, accuracy, preference, rank, log_probs / num_tokens))
    return PasskeyResult(model.name, length, depths=tuple(depths), key_type=prompt.key_type)


def run_trials(model: EvaluatedModel, trials: list[PasskeyTrial]) -> list[TrialOutcome]:
    """Score trials of equal length in one forward pass."""
    input_ids_BN, sizes = torch.tensor([trial.input_ids for trial in trials]), [len(trial.key) for trial in trials]
    length = input_ids_BN.shape[1]
    scored_BN = torch.arange(length) >= length - torch.tensor(sizes)[:, None]
    log_probs_PV = torch.cat([chunk_PV.cpu() for chunk_PV in model.log_probs(input_ids_BN, scored_BN)])
    outcomes = []
    for trial, log_probs_KV in zip(trials, log_probs_PV.split(sizes), strict=True):
        key_K, fork = torch.tensor(trial.key), trial.divergence
        key_log_probs_K1 = log_probs_KV.gather(-1, key_K[:, None])
        check_finite(key_log_probs_K1)
        # Ties take the middle rank: a model that predicts everything alike gets the rank of chance.
        rank_K = (log_probs_KV > key_log_probs_K1).sum(-1) + ((log_probs_KV == key_log_probs_K1).sum(-1) + 1) / 2
        key_log_prob, other_log_prob = log_probs_KV[fork, [trial.key[fork], trial.distractor[fork]]].tolist()
        outcomes.append(
            TrialOutcome(
                exact_match=torch.equal(log_probs_KV.argmax(-1), key_K),
                preferred=0.5 if key_log_prob == other_log_prob else float(key_log_prob > other_log_prob),
                log_rank_sum=rank_K.log().sum().item(),
                log_prob_sum=key_log_probs_K1.sum().item(),
                num_tokens=len(key_K),
            )
        )
    return outcomes


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
