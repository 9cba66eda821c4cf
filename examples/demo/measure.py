"""What the four models are worth: at each length, where they look, and what they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_posenc
from hf_posenc import analysis
from hf_posenc.evaluation import EvaluationReport

from .stock import TRAINED_LENGTH
from .text import Texts

STOCK = "learned (stock)"
LENGTHS = ("1x", "2x", "4x", "8x")
FAR = 4 * TRAINED_LENGTH
ALLOWED, HELD = 0.10, ("alibi", "t5")
"""By how much perplexity at four times the length may be above that at the trained length, and whose."""
PROMPT, WRITTEN = 'def read(path, encoding=None):\n    """Return the ', 256
"""What they go on from, and how many tokens in all."""
LOOKED_AT = 8
"""Rows of text that attention is averaged over."""


def watched(stock: Path, texts: Texts) -> float:
    """Perplexity of the stock model on the watched text, as far as it reads."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stock), AutoTokenizer.from_pretrained(stock)
    found = hf_posenc.evaluate(
        {"it": model}, texts.watched, lengths=[TRAINED_LENGTH], tokenizer=tokenizer, device="cpu", progress=False
    )
    return perplexity_at(found, "it", TRAINED_LENGTH) or float("nan")


def measured(models: dict[str, Path], texts: Texts) -> EvaluationReport:
    sources = {name: str(path) for name, path in models.items()}
    return hf_posenc.evaluate(sources, texts.test, lengths=LENGTHS, device="cpu")


def perplexity_at(evaluation: EvaluationReport, model: str, length: int) -> float | None:
    """None where the model does not reach."""
    for one in evaluation.perplexity:
        if (one.model, one.length) == (model, length) and one.perplexity is not None:
            return one.perplexity.value
    return None


def end_of(evaluation: EvaluationReport, model: str) -> str | None:
    """Why a model stops, if it does."""
    return next((one.stopped.reason for one in evaluation.perplexity if one.model == model and one.stopped), None)


def growth(evaluation: EvaluationReport, model: str) -> float | None:
    """Of perplexity from the trained length to four times that: 0.1 is a tenth more."""
    near, far = (perplexity_at(evaluation, model, length) for length in (TRAINED_LENGTH, FAR))
    return far / near - 1 if near is not None and far is not None else None


def broken_promises(evaluation: EvaluationReport) -> list[str]:
    """What was to be seen and is not."""
    found = []
    if end_of(evaluation, STOCK) is None:
        found.append("the stock model was to end at its trained length, and goes on")
    for scheme in HELD:
        grown = growth(evaluation, scheme)
        if grown is None or grown > ALLOWED:
            told = "cannot be measured" if grown is None else f"is {grown:+.1%} of that at the trained length"
            found.append(f"{scheme}: perplexity at four times the length {told}, where {ALLOWED:.0%} more are allowed")
    return found


def attended(models: dict[str, Path], texts: Texts) -> list[analysis.AttentionByDistance]:
    """Where each model looks, on rows of the trained length."""
    rows = analysis.tokenize_file(next(iter(models.values())), texts.test, TRAINED_LENGTH, LOOKED_AT)
    return [
        analysis.attention_by_distance(AutoModelForCausalLM.from_pretrained(path), rows, name)
        for name, path in models.items()
    ]


def learned_table(stock: Path) -> analysis.PositionEmbeddings:
    """The positions that the stock model has learnt."""
    model = AutoModelForCausalLM.from_pretrained(stock, position_scheme="learned")
    return analysis.position_embeddings(model, TRAINED_LENGTH)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model wrote: the prompt, up to the trained length, beyond; and why it ended, if it did."""

    model: str
    prompt: str
    within: str
    beyond: str
    end: str | None


def sampled(models: dict[str, Path]) -> list[Sample]:
    return [_sample(name, path) for name, path in models.items()]


def _sample(name: str, directory: Path) -> Sample:
    """Loaded as anybody would load it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    begun = prompt["input_ids"].shape[1]

    def written(tokens: int) -> list[int]:
        set_seed(1)
        how = {"do_sample": True, "temperature": 0.8, "top_k": 40, "eos_token_id": None}
        return model.generate(**prompt, max_length=tokens, **how)[0].tolist()

    try:
        ids, end = written(WRITTEN), None
    except IndexError as error:
        ids = written(TRAINED_LENGTH)
        end = f"asked for {WRITTEN} tokens: {type(error).__name__}: {error}"
    within, beyond = ids[begun:TRAINED_LENGTH], ids[TRAINED_LENGTH:]
    return Sample(name, PROMPT, tokenizer.decode(within), tokenizer.decode(beyond), end)
