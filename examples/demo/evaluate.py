"""Evaluate the four models: perplexity by length, attention by distance, generated text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_posenc
from hf_posenc import analysis
from hf_posenc.evaluation import EvaluationReport

from .pretrain import TRAINED_LENGTH
from .text import TextFiles

STOCK = "learned (stock)"
LENGTHS = ("1x", "2x", "4x", "8x")
FAR = 4 * TRAINED_LENGTH
EXTRAPOLATING_SCHEMES, MAX_INCREASE = ("alibi", "t5"), 0.10
"""At four times the trained length, perplexity of these schemes may be this much higher."""
PROMPT, GENERATED_LENGTH = 'def read(path, encoding=None):\n    """Return the ', 256
NUM_ATTENTION_ROWS = 8


def validation_perplexity(stock: Path, texts: TextFiles) -> float:
    """Perplexity of the stock model on the validation text, at its trained length."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stock), AutoTokenizer.from_pretrained(stock)
    evaluation = hf_posenc.evaluate(
        {STOCK: model}, texts.validation, lengths=[TRAINED_LENGTH], tokenizer=tokenizer, device="cpu", progress=False
    )
    return perplexity_at(evaluation, STOCK, TRAINED_LENGTH) or float("nan")


def evaluate_lengths(models: dict[str, Path], texts: TextFiles) -> EvaluationReport:
    paths = {name: str(path) for name, path in models.items()}
    return hf_posenc.evaluate(paths, texts.test, lengths=LENGTHS, device="cpu")


def perplexity_at(evaluation: EvaluationReport, model: str, length: int) -> float | None:
    """None where the model cannot run at this length."""
    for result in evaluation.perplexity:
        if (result.model, result.length) == (model, length) and result.perplexity is not None:
            return result.perplexity.value
    return None


def stop_reason(evaluation: EvaluationReport, model: str) -> str | None:
    """Why a model cannot run at longer lengths; None if it can."""
    results = [result for result in evaluation.perplexity if result.model == model]
    return next((result.stopped.reason for result in results if result.stopped), None)


def increase(evaluation: EvaluationReport, model: str) -> float | None:
    """The relative increase of perplexity from the trained length to four times that."""
    near, far = (perplexity_at(evaluation, model, length) for length in (TRAINED_LENGTH, FAR))
    return far / near - 1 if near is not None and far is not None else None


def failed_expectations(evaluation: EvaluationReport) -> list[str]:
    """What the demo should show but did not."""
    failures = []
    if stop_reason(evaluation, STOCK) is None:
        failures.append("the stock model should stop at its trained length, but ran past it")
    for scheme in EXTRAPOLATING_SCHEMES:
        change = increase(evaluation, scheme)
        if change is None or change > MAX_INCREASE:
            measured = "could not be measured" if change is None else f"changed by {change:+.1%}"
            failures.append(f"{scheme}: perplexity at 4x {measured}, expected at most +{MAX_INCREASE:.0%}")
    return failures


def attention_by_distance(models: dict[str, Path], texts: TextFiles) -> list[analysis.AttentionByDistance]:
    """The attention of each model by distance, on rows of the trained length."""
    rows = analysis.tokenize_file(next(iter(models.values())), texts.test, TRAINED_LENGTH, NUM_ATTENTION_ROWS)
    return [
        analysis.attention_by_distance(AutoModelForCausalLM.from_pretrained(path), rows, name)
        for name, path in models.items()
    ]


def position_table(stock: Path) -> analysis.PositionEmbeddings:
    """The learned position table of the stock model."""
    model = AutoModelForCausalLM.from_pretrained(stock, position_scheme="learned")
    return analysis.position_embeddings(model, TRAINED_LENGTH)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Generated text up to the trained length and beyond, and the error that ended it, if any."""

    model: str
    prompt: str
    within: str
    beyond: str
    error: str | None


def generate_samples(models: dict[str, Path]) -> list[Sample]:
    return [_generate_sample(name, path) for name, path in models.items()]


def _generate_sample(name: str, directory: Path) -> Sample:
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    prompt_length = prompt["input_ids"].shape[1]

    def generate(max_length: int) -> list[int]:
        set_seed(1)
        options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "eos_token_id": None}
        return model.generate(**prompt, max_length=max_length, **options)[0].tolist()

    try:
        ids, message = generate(GENERATED_LENGTH), None
    except IndexError as error:
        ids = generate(TRAINED_LENGTH)
        message = f"{GENERATED_LENGTH} tokens requested: {type(error).__name__}: {error}"
    within, beyond = ids[prompt_length:TRAINED_LENGTH], ids[TRAINED_LENGTH:]
    return Sample(name, PROMPT, tokenizer.decode(within), tokenizer.decode(beyond), message)
