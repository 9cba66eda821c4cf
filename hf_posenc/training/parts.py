"""What a run is made of: the model, its teacher, its tokenizer and its rows."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ..checkpoints.config_file import read_config
from ..checkpoints.shards import read_shards
from ..config import VariantConfig
from ..patches.attach import plan_schemes, with_scheme
from ..patches.live_models import ARCHITECTURES
from ..text_data import INPUT_IDS as IDS
from ..text_data import load_text_dataset as read
from ..validation import truncate_repr
from .classes import Classes
from .corpus import Corpus
from .objective import Objective
from .own_text import own_text
from .request import OWN_TEXT, SELF, Request
from .stages import Staged
from .teacher import Teacher

MOST_OWN_ROWS = 4096
FIRST_OF_STREAM, ROWS_AT_A_TIME = 64, 1000


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
        plan_schemes(ARCHITECTURES[variant.stock_class.model_type], variant)


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


def dtype_of(config: Any) -> torch.dtype:
    """Of a checkpoint's weights, as its config has it."""
    found = config.dtype
    return found if isinstance(found, torch.dtype) else getattr(torch, found or "float32")


def teacher_of(request: Request, objective: Objective, packing: bool, classes: Classes | None = None) -> Teacher | None:
    if request.teacher is not None and not request.recipe.teacher:
        raise ValueError("--teacher-model names a teacher, and --no-teacher or --recipe naive has none: take one away")
    if not request.recipe.teacher or (request.scheme is None and request.teacher is None):
        return None  # of a variant, the original is not known
    changes = dict(classes.fields) if classes is not None else {}
    source, revision = (request.teacher, None) if request.teacher is not None else (request.model, request.revision)
    if packing and objective is not Objective.CAUSAL and not isinstance(read_config(source, revision), VariantConfig):
        # A stock encoder does not tell the documents of a row apart; with its own table as a scheme it does.
        changes["position_scheme"] = "learned"
    model, found = _loaded(objective.auto_class, source, revision=revision, output_loading_info=True, **changes)
    if request.teacher is not None:
        student = read_config(request.model, request.revision)
        _refuse_other_sizes(model.config, student, request, objective.predicts_tokens)
    return Teacher(model, head_is_new=bool(found["missing_keys"]))


def _refuse_other_sizes(teacher: Any, student: Any, request: Request, predicts_tokens: bool) -> None:
    """What is compared must be as large."""
    weights = request.recipe.weights
    compared = [("vocab_size", "tokens", predicts_tokens and weights.predictions, "--prediction-weight")]
    compared.append(("hidden_size", "features", weights.states, "--state-weight"))
    compared.append(("num_hidden_layers", "layers", weights.states, "--state-weight"))
    for name, what, weight, option in compared:
        theirs, ours = getattr(teacher, name), getattr(student, name)
        if weight and theirs != ours:
            raise ValueError(
                f"the teacher {request.teacher} has {theirs:,} {what} and {request.model} has {ours:,}: name one of "
                f"the same size, or pass {option} 0"
            )


def tokenizer_of(request: Request, objective: Objective) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(request.model, revision=request.revision, trust_remote_code=False)
    except Exception as error:  # whatever tokenizers make of files that are damaged, or not there
        tokenizer, problem = None, f": {truncate_repr(error)}"
    else:
        problem = ""
    # Without any files, transformers makes one that knows no words.
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_ids):
        tokenizer = None
    if tokenizer is None:
        if request.data == SELF and objective is Objective.CAUSAL and request.eval_data is None:
            return None  # text of a model's own is tokens from the start
        raise ValueError(
            f"{request.model} has no tokenizer to read text with{problem}. Save the one that it was trained with there"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def documents_of(request: Request, directory: Path, writer: Any, wanted_rows: int, length: int, main: bool) -> Any:
    """The text to train on. A model's own is written once and kept: who goes on later goes on with the same."""
    if request.data != SELF:
        return read(request.data, request.split, request.streaming)
    from datasets import Dataset

    path = directory / OWN_TEXT
    if main:
        rows, length = request.self_rows or min(wanted_rows, MOST_OWN_ROWS), min(length, _longest(writer))
        name = request.teacher or request.model
        written = {"model": str(name), "revision": str(request.revision), "rows": f"{rows} of {length}"}
        if not _is_written_by(path, written):
            ids = own_text(writer, rows, length)
            beside = path.with_suffix(".new")
            directory.mkdir(parents=True, exist_ok=True)
            save_file({IDS: ids}, beside, metadata=written)
            beside.replace(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return Dataset.from_dict({IDS: load_file(path)[IDS].tolist()})


def _longest(model: Any) -> int:
    return int(model.config.max_position_embeddings)


def _is_written_by(path: Path, writer: dict[str, str]) -> bool:
    """Not by another model, in a run that was given up before it was noted down."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}) == writer
    except SafetensorError:
        return False


def told_apart(rows: Any) -> dict[str, Any]:
    """Enough of some rows to notice that they are others than before: all of them, or the first of a stream."""
    digest = hashlib.sha256()
    if not hasattr(rows, "__len__"):
        for row in itertools.islice(rows, FIRST_OF_STREAM):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return {"streamed": True, "sha256": digest.hexdigest()}
    for part in rows.datasets if isinstance(rows, Staged) else [rows]:
        for batch in part.with_format("arrow").iter(ROWS_AT_A_TIME):
            for name in sorted(batch.column_names):
                values = batch.column(name).combine_chunks()
                if hasattr(values, "value_lengths"):  # of a column of lists
                    digest.update(values.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                    values = values.flatten()
                digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return {"count": len(rows), "sha256": digest.hexdigest()}


def corpus_for(
    tokenizer: Any, request: Request, objective: Objective, packing: bool, classes: Classes | None = None
) -> Any:
    def corpus(length: int) -> Corpus:
        return Corpus(tokenizer, length, objective, packing, request.text_column, request.label_column, classes)

    return corpus
