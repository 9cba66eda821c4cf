"""Passkey retrieval: hide a key in a long text and ask for it at the end.

Greedy decoding reproduces the key exactly if each of its tokens is the model's first choice after those before it, so
one forward pass over the text and the key decides. Small models rarely get there; whether they prefer the key to a
random one, and its rank, show what they retain.

Shapes: B trials in a batch, N tokens in a trial, K tokens in a key, P key tokens in a batch, V vocabulary entries.
"""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from transformers import PreTrainedTokenizerBase

from .models import EvaluatedModel
from .results import DepthResult, EvaluationStopped, PasskeyResult, proportion_estimate
from .settings import EvaluationSettings, ProcessGroup

QUESTION, FULL_STOP = " The secret number is", "."
NUMBERS, TOKENS = "numbers", "tokens"
DIGITS_PER_KEY, TOKENS_PER_KEY = 5, 4


@dataclasses.dataclass(frozen=True)
class PasskeyTrial:
    """Input ids that end in the key, and a random key that is not in the text."""

    input_ids: list[int]
    key: list[int]
    distractor: list[int]

    @property
    def divergence(self) -> int:
        """The first token at which the two keys differ."""
        index = _first_difference(self.key, self.distractor)
        assert index is not None
        return index


@dataclasses.dataclass(frozen=True)
class PasskeyPrompt:
    """Builds trials from a text. `key_type` is "numbers", or "tokens" if the tokenizer cannot represent numbers."""

    token_ids: torch.Tensor
    prefix: list[int]
    question: list[int]
    full_stop: list[int]
    key_type: str
    tokenizer: PreTrainedTokenizerBase | None

    @classmethod
    def from_model(cls, model: EvaluatedModel) -> PasskeyPrompt:
        tokenizer, prefix = model.tokenizer, list(model.special_tokens.prefix)
        question = [] if tokenizer is None else _encode(tokenizer, QUESTION)
        if tokenizer is None or not question:  # no tokenizer, or one that drops these words
            question = model.token_ids[: len(QUESTION.split())].tolist()
            return cls(model.token_ids, prefix, question, question[:1], TOKENS, None)
        first = 10 ** (DIGITS_PER_KEY - 1)
        samples = {tuple(_encode(tokenizer, f" {number}")) for number in range(first, first + 20)}
        has_numbers = len(samples) == 20 and not any(tokenizer.unk_token_id in ids for ids in samples)
        key_type = NUMBERS if has_numbers else TOKENS
        return cls(model.token_ids, prefix, question, _encode(tokenizer, FULL_STOP), key_type, tokenizer)

    def trial(self, length: int, depth: float, seed: str) -> PasskeyTrial:
        """A trial of `length` tokens with the key at a depth from 0 (start) to 1 (end)."""
        generator = random.Random(seed)
        key = self._random_key(generator)
        distractor = key
        while _first_difference(key, distractor) is None:
            distractor = self._random_key(generator)
        needle = [*self.question, *key, *self.full_stop]
        room = length - len(self.prefix) - len(needle) - len(self.question) - len(key)
        if room < 0:
            raise EvaluationStopped(f"{length} tokens are too few for a passkey and its question: use {length - room}")
        positions = (torch.arange(room) + generator.randrange(len(self.token_ids))) % len(self.token_ids)
        filler = self.token_ids[positions].tolist()
        start = round(depth * room)
        input_ids = [*self.prefix, *filler[:start], *needle, *filler[start:], *self.question, *key]
        return PasskeyTrial(input_ids, key, distractor)

    def _random_key(self, generator: random.Random) -> list[int]:
        if self.key_type == NUMBERS and self.tokenizer is not None:
            number = generator.randrange(10 ** (DIGITS_PER_KEY - 1), 10**DIGITS_PER_KEY)
            return _encode(self.tokenizer, f" {number}")
        return [int(self.token_ids[generator.randrange(len(self.token_ids))]) for _ in range(TOKENS_PER_KEY)]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _first_difference(key: list[int], other: list[int]) -> int | None:
    return next((n for n, (a, b) in enumerate(zip(key, other, strict=False)) if a != b), None)


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """How a model did in one trial. `preferred` is 1 or 0, or 0.5 for a tie, which is common in bfloat16."""

    exact_match: bool
    preferred: float
    log_rank_sum: float
    log_prob_sum: float
    num_tokens: int


def evaluate_passkey(
    model: EvaluatedModel, length: int, settings: EvaluationSettings, group: ProcessGroup
) -> PasskeyResult:
    """Passkey retrieval in texts of one length, by depth."""
    if not model.causal:
        raise EvaluationStopped("Passkey retrieval requires a causal model")
    if len(model.token_ids.unique()) < 2:
        raise EvaluationStopped("The text repeats a single token, so no two passkeys would differ: use another text")
    prompt = PasskeyPrompt.from_model(model)
    cases = [(depth, trial) for depth in settings.passkey_depths for trial in range(settings.passkey_trials)]

    def outcomes(indices: list[int]) -> list[TrialOutcome]:
        chosen = [cases[index] for index in indices]
        return run_trials(model, [prompt.trial(length, case[0], f"{settings.seed} {length} {case}") for case in chosen])

    description = f"{model.name}: passkey at {length} tokens"
    results = group.map_batches(outcomes, len(cases), settings.batch_size(length), description)
    depths = tuple(
        _summarize(depth, results[number * settings.passkey_trials :][: settings.passkey_trials], settings.confidence)
        for number, depth in enumerate(settings.passkey_depths)
    )
    return PasskeyResult(model.name, length, depths=depths, key_type=prompt.key_type)


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


def _summarize(depth: float, outcomes: list[TrialOutcome], confidence: float) -> DepthResult:
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    return DepthResult(
        depth=depth,
        num_trials=len(outcomes),
        accuracy=proportion_estimate(sum(outcome.exact_match for outcome in outcomes), len(outcomes), confidence),
        preference=proportion_estimate(sum(outcome.preferred for outcome in outcomes), len(outcomes), confidence),
        rank=math.exp(sum(outcome.log_rank_sum for outcome in outcomes) / num_tokens),
        log_prob=sum(outcome.log_prob_sum for outcome in outcomes) / num_tokens,
    )
