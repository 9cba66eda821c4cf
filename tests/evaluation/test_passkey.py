"""Passkey retrieval, with models that are known to find the key or not."""

from __future__ import annotations

import math

import pytest
import torch

from hf_posenc.evaluation.metrics import NUMBERS, QUESTION, TOKENS, PasskeyPrompt, evaluate_passkey, run_trials
from hf_posenc.evaluation.results import EvaluationStopped, proportion_estimate
from tests.support import tiny_models as tiny
from tests.support.evaluation import (
    BOS,
    FIRST_QUESTION_WORD,
    CopyModel,
    evaluated_model,
    make_tokenizer,
    random_ids,
)

DIGIT_TOKENIZER = make_tokenizer(add_special_tokens=False, digits=True)


def test_accuracy_follows_how_far_back_a_model_sees() -> None:
    settings = {"passkey_depths": (0.0, 0.5, 1.0), "passkey_trials": 6, "batch_tokens": 200}
    whole, near, blind = (
        evaluate_passkey(evaluated_model(CopyModel(context), random_ids(500), DIGIT_TOKENIZER, **settings), 60)
        for context in (10**9, 25, 2)
    )
    assert whole.key_type == NUMBERS
    assert [cell.depth for cell in whole.depths] == [0, 0.5, 1]
    assert all(cell.accuracy.value == cell.preference.value == cell.rank == 1 for cell in whole.depths)
    assert all(0.5 < cell.accuracy.confidence_interval[0] < 1 for cell in whole.depths)
    assert [cell.accuracy.value for cell in near.depths] == [0, 0, 1]
    assert near.depths[0].rank > 1
    assert near.depths[0].log_prob < near.depths[2].log_prob
    assert [cell.accuracy.value for cell in blind.depths] == [0, 0, 0]


def test_exact_match_is_what_greedy_decoding_writes() -> None:
    model = CopyModel(context=30)
    evaluated = evaluated_model(model, random_ids(500), DIGIT_TOKENIZER)
    prompt = PasskeyPrompt(evaluated)
    trials = [prompt.trial(60, depth, f"{depth} {number}") for depth in (0.0, 0.6, 0.7, 1.0) for number in range(4)]
    decoded = []
    for trial in trials:
        ids = trial.input_ids[: -len(trial.key)]
        for _ in trial.key:
            ids = [*ids, model.predict(ids)]
        decoded.append(ids == trial.input_ids)
    assert [outcome.exact_match for outcome in run_trials(evaluated, trials)] == decoded
    assert len(set(decoded)) == 2


def test_the_start_of_a_key_is_not_a_match() -> None:
    class ForgetfulModel(CopyModel):
        """Predicts the first token of a key only."""

        def predict(self, ids: list[int]) -> int:
            return super().predict(ids) if ids[-1] < FIRST_QUESTION_WORD + len(QUESTION.split()) else 0

    evaluated = evaluated_model(ForgetfulModel(), random_ids(500), DIGIT_TOKENIZER, passkey_trials=4)
    result = evaluate_passkey(evaluated, 60)
    assert all(cell.accuracy.value == 0 and cell.rank > 1 for cell in result.depths)
    assert any(cell.preference.value > 0.5 for cell in result.depths)


def test_a_constant_model_is_at_chance() -> None:
    """Ties are common in bfloat16: counting them for or against the key would bias the result."""

    class ConstantModel(CopyModel):
        def states(self, input_ids_BN: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*input_ids_BN.shape, tiny.VOCABULARY)

    result = evaluate_passkey(evaluated_model(ConstantModel(), random_ids(500), passkey_trials=4), 60)
    for cell in result.depths:
        assert cell.preference == proportion_estimate(2, 4, 0.95)
        assert cell.rank == pytest.approx((tiny.VOCABULARY + 1) / 2)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_ranks_and_probabilities_match_the_logits(architecture: str) -> None:
    model = tiny.model(architecture)
    evaluated = evaluated_model(model, random_ids(200), make_tokenizer(digits=True))
    prompt = PasskeyPrompt(evaluated)
    trials = [prompt.trial(40, 0.3, str(number)) for number in range(5)]
    for trial, outcome in zip(trials, run_trials(evaluated, trials), strict=True):
        assert len(trial.input_ids) == 40
        assert trial.input_ids[0] == BOS
        with torch.no_grad():
            log_probs = model(torch.tensor([trial.input_ids])).logits[0, -1 - len(trial.key) : -1].log_softmax(-1)
        key_log_probs = [row[token].item() for row, token in zip(log_probs, trial.key, strict=True)]
        ranks = [int((row > row[token]).sum()) + 1 for row, token in zip(log_probs, trial.key, strict=True)]
        assert outcome.log_prob_sum == pytest.approx(sum(key_log_probs), rel=1e-5)
        assert outcome.log_rank_sum == pytest.approx(sum(math.log(rank) for rank in ranks), rel=1e-6)
        fork = trial.divergence
        assert trial.key[:fork] == trial.distractor[:fork]
        assert outcome.preferred == bool(log_probs[fork, trial.key[fork]] > log_probs[fork, trial.distractor[fork]])


@pytest.mark.parametrize(
    ("tokenizer", "key_type"), [(DIGIT_TOKENIZER, NUMBERS), (make_tokenizer(), TOKENS), (None, TOKENS)]
)
def test_keys_are_at_the_requested_depth(tokenizer: object, key_type: str) -> None:
    prompt = PasskeyPrompt(evaluated_model(CopyModel(), random_ids(300), tokenizer))
    assert prompt.key_type == key_type
    starts = []
    for depth in (0.0, 0.5, 1.0):
        trial = prompt.trial(80, depth, "seed")
        assert len(trial.input_ids) == 80
        assert trial.input_ids[-len(trial.key) :] == trial.key
        needle = [*prompt.question, *trial.key, *prompt.full_stop]
        starts.append(next(n for n in range(80) if trial.input_ids[n : n + len(needle)] == needle))
    first = len(prompt.prefix)
    room = 80 - first - len(needle) - len(prompt.question) - len(trial.key)
    assert starts == [first, first + round(room / 2), first + room]
    assert prompt.trial(80, 0.5, "seed") == prompt.trial(80, 0.5, "seed")
    assert prompt.trial(80, 0.5, "seed") != prompt.trial(80, 0.5, "other")
    with pytest.raises(EvaluationStopped, match="too few"):
        prompt.trial(6, 0.5, "seed")


def test_passkeys_require_a_causal_model() -> None:
    encoder = evaluated_model(tiny.model("bert"), random_ids(100), make_tokenizer(), causal=False)
    with pytest.raises(EvaluationStopped, match="causal"):
        evaluate_passkey(encoder, 40)


def test_passkeys_require_more_than_one_token() -> None:
    model = evaluated_model(CopyModel(), torch.full((100,), 5))
    with pytest.raises(EvaluationStopped, match="single token"):
        evaluate_passkey(model, 40)
