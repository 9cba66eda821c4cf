"""What a run is made of: the model, its teacher, its tokenizer and its rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ..checkpoints.configs import read_config
from ..checkpoints.shards import read_shards
from ..config import VariantConfig
from ..grammar import parse, schedule_of
from ..patches.attach import plan, with_scheme
from ..patches.live import ARCHITECTURES
from ..schedule import with_handover
from .corpus import Corpus
from .objective import Objective
from .own_text import own_text
from .request import SELF, Request
from .teacher import Teacher
from .texts import IDS, read

OWN_TEXT = "own_text.safetensors"
MOST_OWN_ROWS = 4096


def config_of(request: Request) -> Any:
    config = read_config(request.model, request.revision)
    variant = isinstance(config, VariantConfig)
    if variant and request.scheme is not None:
        raise ValueError(
            f"{request.model} is a variant already, with the position scheme {config.position_scheme!r}: leave out "
            "--scheme to train it, or begin with the checkpoint that it was made from"
        )
    if not variant and request.scheme is None:
        raise ValueError(f"{request.model} is a stock model: name the position scheme that it shall have with --scheme")
    if not variant and config.model_type not in ARCHITECTURES:
        raise ValueError(f"{request.model} is a {config.model_type!r} model; hf_posenc knows {sorted(ARCHITECTURES)}")
    _refuse_early(config, request)
    return config


def _refuse_early(config: Any, request: Request) -> None:
    """Before any text is read: weights that are not whole, and a scheme that does not fit the model."""
    directory = Path(request.model).expanduser()
    if directory.is_dir():
        read_shards(directory)
    variant = config if request.scheme is None else with_scheme(config, request.scheme)
    with torch.device("meta"):
        plan(ARCHITECTURES[variant.stock_class.model_type], variant)


def load(auto_class: Any, request: Request, **changes: Any) -> Any:
    return _loaded(auto_class, request.model, revision=request.revision, **changes)


def _loaded(auto_class: Any, source: str, **changes: Any) -> Any:
    """From safetensors only, and without any code of the checkpoint's own."""
    if Path(source).expanduser().is_dir():
        read_shards(Path(source).expanduser())
    try:
        return auto_class.from_pretrained(source, use_safetensors=True, trust_remote_code=False, **changes)
    except OSError as error:
        raise ValueError(f"{source} cannot be loaded; only safetensors are read: {error}") from error


def student_of(request: Request, objective: Objective, handover_steps: int | None) -> Any:
    """The model to be trained; at the start of a handover where there is one, or something to be fitted."""
    if request.scheme is None:
        return load(objective.auto_class, request)
    scheme = request.scheme
    if handover_steps is not None and schedule_of(parse(scheme)) is None:
        scheme = with_handover(scheme, handover_steps)
    return load(objective.auto_class, request, position_scheme=scheme)


def teacher_of(request: Request, objective: Objective, config: Any, packing: bool) -> Teacher | None:
    if not request.recipe.teacher:
        return None
    if request.teacher is not None:
        return Teacher(_loaded(objective.auto_class, request.teacher))
    if request.scheme is None:
        return None  # a variant, whose original is not known
    # A stock encoder does not tell the documents of a row apart; with its own table as a scheme it does.
    own = {"position_scheme": "learned"} if packing and objective is not Objective.CAUSAL else {}
    return Teacher(load(objective.auto_class, request, **own))


def tokenizer_of(request: Request, objective: Objective) -> Any:
    if request.data == SELF and objective is Objective.CAUSAL:
        try:
            return AutoTokenizer.from_pretrained(request.model, revision=request.revision, trust_remote_code=False)
        except (OSError, ValueError):
            return None  # text of a model's own is tokens from the start
    tokenizer = AutoTokenizer.from_pretrained(request.model, revision=request.revision, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def documents_of(request: Request, directory: Path, teacher: Any, wanted_rows: int, length: int, main: bool) -> Any:
    """The text to train on. A model's own is written once and kept: who goes on later goes on with the same."""
    if request.data != SELF:
        return read(request.data, request.split, request.streaming)
    from datasets import Dataset

    path = directory / OWN_TEXT
    if main and not path.is_file():
        model = teacher.model if isinstance(teacher, Teacher) else teacher
        rows = request.self_rows or min(wanted_rows, MOST_OWN_ROWS)
        ids = own_text(model, rows, min(length, model.config.max_position_embeddings))
        beside = path.with_suffix(".new")
        directory.mkdir(parents=True, exist_ok=True)
        save_file({IDS: ids}, beside)
        beside.replace(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return Dataset.from_dict({IDS: load_file(path)[IDS].tolist()})


def told_apart(rows: Any) -> dict[str, Any]:
    """Enough of some rows to notice that they are others than before."""
    if not hasattr(rows, "__len__"):
        return {"streamed": True}
    places = sorted({*range(min(8, len(rows))), *range(max(len(rows) - 8, 0), len(rows))})
    seen = json.dumps([rows[place][IDS] for place in places])
    return {"count": len(rows), "sha256": hashlib.sha256(seen.encode()).hexdigest()}


def corpus_for(tokenizer: Any, request: Request, objective: Objective, packing: bool) -> Any:
    def corpus(length: int) -> Corpus:
        return Corpus(tokenizer, length, objective, packing, request.text_column, request.label_column)

    return corpus
