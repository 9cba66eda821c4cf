"""A model that is measured: with its tokenizer, the text in its tokens, and what tells it apart from others."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from ..training.objective import Objective, objective_of
from .windows import Frame

SAMPLED = 64
"""Values of each parameter that go into a model's fingerprint."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model to be measured, by name: not loaded yet, or live."""

    name: str
    source: str | nn.Module
    config: Any
    objective: Objective

    @property
    def causal(self) -> bool:
        return self.objective is Objective.CAUSAL


@dataclasses.dataclass(frozen=True)
class Subject:
    """A candidate, ready to be run."""

    name: str
    model: Any
    tokenizer: Any
    objective: Objective
    stream: torch.Tensor
    frame: Frame
    device: torch.device

    @property
    def causal(self) -> bool:
        return self.objective is Objective.CAUSAL


def candidates_of(models: Any, task: str | None, revision: str | None) -> list[Candidate]:
    """One model, a list of them, or a mapping of names to them: directories, Hub ids or live models."""
    if isinstance(models, Mapping):
        named = [(str(name), source) for name, source in models.items()]
    else:
        several = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
        named = list(zip(_names(several), several, strict=True))
    if not named:
        raise ValueError("name at least one model to measure")
    return [_candidate(name, source, task, revision) for name, source in named]


def _names(sources: list[Any]) -> list[str]:
    """Short where that tells them apart: the last part of a path, the class of a live model."""
    short = [type(s).__name__ if isinstance(s, nn.Module) else Path(str(s)).name or str(s) for s in sources]
    if len(set(short)) == len(short):
        return short
    whole = [type(s).__name__ if isinstance(s, nn.Module) else str(s) for s in sources]
    if len(set(whole)) == len(whole):
        return whole
    raise ValueError(f"the models {whole} need names to be told apart: pass a mapping, or name=path each")


def _candidate(name: str, source: Any, task: str | None, revision: str | None) -> Candidate:
    if isinstance(source, nn.Module):
        head = types.SimpleNamespace(architectures=[type(source).__name__])
        return Candidate(name, source, source.config, objective_of(head, task))
    try:
        config = AutoConfig.from_pretrained(str(source), revision=revision)
    except (OSError, ValueError) as error:
        here = "" if Path(str(source)).exists() else " (there is no such directory, so that it was taken for a Hub id)"
        raise ValueError(f"{source} cannot be loaded{here}: {error}") from error
    return Candidate(name, str(source), config, objective_of(config, task))


def tokenizer_for(candidate: Candidate, given: Any, revision: str | None) -> Any:
    """The one that is given, or the one beside the checkpoint; None where there is none."""
    if given is not None:
        return AutoTokenizer.from_pretrained(given) if isinstance(given, (str, Path)) else given
    source = candidate.source if isinstance(candidate.source, str) else getattr(candidate.config, "name_or_path", "")
    if not source:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def loaded(candidate: Candidate, dtype: str | None, device: torch.device, revision: str | None) -> Iterator[Any]:
    """The model in eval mode: from its files, or the live one as and where it is, given back as it was."""
    if isinstance(candidate.source, nn.Module):
        if dtype is not None:
            raise ValueError("a live model is measured in the dtype it has: leave out dtype, or pass its directory")
        model: Any = candidate.source
        was_training = model.training
        try:
            yield model.eval()
        finally:
            model.train(was_training)
        return
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"there is no dtype {dtype!r}; there are {DTYPES}")
    yield _from_files(candidate, dtype, revision).to(device).eval()


def _from_files(candidate: Candidate, dtype: str | None, revision: str | None) -> Any:
    """The model, all of it: parts that are not in the files would be random, and so would what is measured."""
    task = candidate.objective.value
    try:
        model, loading = candidate.objective.auto_class.from_pretrained(
            candidate.source,
            dtype="auto" if dtype is None else getattr(torch, dtype),
            revision=revision,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        told = str(error).split("Model type should be")[0].strip()
        raise ValueError(f"{candidate.source} cannot be loaded for the task {task}: {told}") from error
    missing = sorted(key for key in loading["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ValueError(
            f"{candidate.source} lacks weights for the task {task}, among them {missing[0]}: leave out the task, or "
            "name a checkpoint that has them"
        )
    return model


def fingerprint(model: nn.Module) -> str:
    """Other weights, another fingerprint: a few values of every parameter are looked at."""
    seen = hashlib.sha256(str(getattr(model.config, "position_scheme", None)).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        values = flat[:: max(len(flat) // SAMPLED, 1)][: 2 * SAMPLED].double().cpu()
        seen.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        seen.update(values.numpy().tobytes())
    return seen.hexdigest()[:16]


def refuse_foreign_tokens(subject: Subject) -> None:
    most, known = int(subject.stream.max()), int(subject.model.config.vocab_size)
    if most >= known:
        raise ValueError(f"token {most} of the text is not in the {known} of {subject.name}: is it its tokenizer?")
