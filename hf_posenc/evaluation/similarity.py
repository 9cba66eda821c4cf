"""How like the original's are a model's embeddings of the same texts? For encoders; causal models have states too."""

from __future__ import annotations

import math

import torch
from torch import nn

from .crew import Crew
from .estimates import mean
from .halt import Halt
from .results import SimilarityResult
from .scoring import rows_at_once, states
from .settings import Settings
from .subject import Subject
from .text import digest
from .windows import Windows, cut

MOST_WINDOWS = 512
FEWEST_TO_COMPARE = 3
"""Texts that it takes for their pairs to correlate in any way but fully."""


def measure_similarity(
    subject: Subject, original: Subject, length: int, settings: Settings, crew: Crew
) -> SimilarityResult:
    if digest(subject.stream) != digest(original.stream):
        raise ValueError(
            f"{subject.name} and {original.name} read the text in other tokens: embeddings are compared between "
            "models with one tokenizer"
        )
    windows = cut(subject.stream, subject.frame, length)
    mine_WE = embeddings(subject, windows, settings, crew)
    try:
        its_WE = embeddings(original, windows, settings, crew)
    except Halt as halt:
        raise Halt(f"the original, {original.name}: {halt.reason}", halt.lasting) from halt
    cosines_W = nn.functional.cosine_similarity(mine_WE, its_WE)
    return SimilarityResult(
        model=subject.name,
        length=length,
        original=original.name,
        cosine=mean(cosines_W, torch.ones(len(cosines_W)), settings.confidence).within(-1.0, 1.0),
        agreement=agreement(mine_WE, its_WE) if len(mine_WE) >= FEWEST_TO_COMPARE else None,
        windows=len(cosines_W),
    )


def embeddings(subject: Subject, windows: Windows, settings: Settings, crew: Crew) -> torch.Tensor:
    """The mean of the last hidden states of each window, (W, E)."""
    saying = f"{subject.name}, embeddings at {windows.length} tokens"
    count = min(len(windows), MOST_WINDOWS)

    def work() -> list[tuple[int, list[float]]]:
        done: list[tuple[int, list[float]]] = []
        for numbers in crew.batches(count, rows_at_once(settings.batch_tokens, windows.length), saying):
            states_BNE = states(subject.model, windows.rows(numbers).to(subject.device))
            done += zip(numbers, states_BNE.double().mean(1).tolist(), strict=True)
        return done

    return torch.tensor(crew.collect(work), dtype=torch.float64)


def agreement(first_WE: torch.Tensor, second_WE: torch.Tensor) -> float | None:
    """Pearson's correlation of the cosines of all pairs of windows under both models; None where all are the same."""
    above = torch.ones(len(first_WE), len(first_WE)).triu(1).bool()
    cosines = []
    for embeddings_WE in (first_WE, second_WE):
        unit_WE = nn.functional.normalize(embeddings_WE, dim=-1)
        cosines.append((unit_WE @ unit_WE.T)[above])
    found = torch.corrcoef(torch.stack(cosines))[0, 1].item()
    return None if math.isnan(found) else found
