"""Passkey retrieval: hide a key in a long text and ask for it at the end.

Greedy decoding reproduces the key exactly if each of its tokens is the model's first choice after those before it, so
one forward pass over the text and the key decides. Small models rarely get there; whether they prefer the key to a
random one, and its rank, show what they retain.

Shapes: B trials in a batch, N tokens in a trial, K tokens in a key, P key tokens in a batch, V vocabulary entries.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch

from .models import EvaluatedModel
from .results import DepthResult, EvaluationStopped, PasskeyResult, proportion_estimate

QUESTION, FULL_STOP = " The secret number is", "."
NUMBERS, TOKENS = "numbers", "tokens"
DIGITS_PER_KEY, TOKENS_PER_KEY = 5, 4


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
    """Passkey retrieval in texts of one length, by depth."""
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
