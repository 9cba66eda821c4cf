"""Build the components of a training run: config, tokenizer, teacher, student and datasets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from ..checkpoints import read_config, read_shards
from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import ARCHITECTURES, architecture_of, plan_schemes, with_scheme
from ..text_data import load_text_dataset
from ..validation import truncate_repr
from .arguments import SELF_GENERATED, Stage, TrainRequest, resolve_fit_ratio, rows_per_step
from .data import RowBuilder, StagedDataset, sample_input_ids, self_generated_dataset
from .distillation import Teacher
from .objectives import Objective
from .warm_start import absorb_table_mean, fit

logger = logging.get_logger(__name__)
MAX_SELF_GENERATED_ROWS = 4096
FIT_ROWS, FIT_ROWS_TABLE, FIT_LENGTH, MAX_FIT_STEPS = 2, 4, 128, 2000
"""Small batches of short rows fit best for their cost; to remove a position table takes more rows to average over."""


def load_config(request: TrainRequest) -> PreTrainedConfig:
    """The config of the model to train. Whatever is wrong with the model or the scheme is refused here, early.

    Raises:
        PosEncError: If the model and the scheme do not go together, or the weights are damaged.
    """
    config = read_config(request.model, request.revision)
    is_variant = isinstance(config, VariantConfig)
    if is_variant and request.scheme is not None:
        raise PosEncError(
            f"{request.model} already has the position scheme {config.position_scheme!r}: leave out --scheme to train "
            "it, or start from the stock checkpoint"
        )
    if not is_variant and config.model_type not in ARCHITECTURES:
        raise PosEncError(f"Unsupported model type {config.model_type!r}; expected one of {sorted(ARCHITECTURES)}")
    if not is_variant and request.scheme is None:
        raise PosEncError(f"{request.model} is a stock model: choose its new position scheme with --scheme")
    directory = Path(request.model).expanduser()
    if directory.is_dir():
        read_shards(directory)
    variant = config if request.scheme is None else with_scheme(config, request.scheme)
    with torch.device("meta"):
        plan_schemes(ARCHITECTURES[variant.stock_class.model_type], variant)
    return config


def load_model(objective: Objective, source: str, revision: str | None, **options: Any) -> Any:
    """`from_pretrained` of the objective's Auto class, from safetensors only and without remote code."""
    if Path(source).expanduser().is_dir():
        read_shards(Path(source).expanduser())
    options |= {"revision": revision, "use_safetensors": True, "trust_remote_code": False}
    try:
        return objective.auto_class.from_pretrained(source, **options)
    except OSError as error:
        raise PosEncError(f"Cannot load {source}: {error}. Only safetensors weights are supported") from error


def load_tokenizer(request: TrainRequest, objective: Objective) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None if it has none and none is needed, because the model generates its own text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(request.model, revision=request.revision, trust_remote_code=False)
        problem = "the directory has no tokenizer files"
    except Exception as error:  # damaged or missing files raise all kinds of errors
        tokenizer, problem = None, truncate_repr(error)
    # Without any files, transformers builds a tokenizer that knows special tokens only.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        if request.data == SELF_GENERATED and objective is Objective.CAUSAL and request.eval_data is None:
            return None
        raise PosEncError(f"Cannot load a tokenizer from {request.model}: {problem}. Save the model's tokenizer there")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def build_teacher(
    request: TrainRequest, objective: Objective, packing: bool, config_fields: dict[str, Any] | None = None
) -> Teacher | None:
    """The model to distill from: the stock model, or the one that the request names."""
    if not request.recipe.teacher or (request.scheme is None and request.teacher_model is None):
        return None  # the stock model of a variant is unknown
    options = dict(config_fields or {})
    source, revision = request.model, request.revision
    if request.teacher_model is not None:
        source, revision = request.teacher_model, None
    if packing and objective is not Objective.CAUSAL and not isinstance(read_config(source, revision), VariantConfig):
        # A stock encoder does not separate packed documents; with its own table as a scheme it does.
        options["position_scheme"] = "learned"
    model, loading_info = load_model(objective, source, revision, output_loading_info=True, **options)
    if request.teacher_model is not None:
        _check_teacher_sizes(model.config, read_config(request.model, request.revision), request, objective)
    return Teacher(model, has_new_head=bool(loading_info["missing_keys"]))


def _check_teacher_sizes(
    teacher: PreTrainedConfig, student: PreTrainedConfig, request: TrainRequest, objective: Objective
) -> None:
    weights = request.recipe.loss_weights
    compared = (
        ("vocab_size", objective.predicts_tokens and weights.kl, "--kl-loss-weight"),
        ("hidden_size", weights.hidden, "--hidden-loss-weight"),
        ("num_hidden_layers", weights.hidden, "--hidden-loss-weight"),
    )
    for name, weight, option in compared:
        if weight and getattr(teacher, name) != getattr(student, name):
            raise PosEncError(
                f"The teacher {request.teacher_model} has {name} {getattr(teacher, name)}, but {request.model} has "
                f"{getattr(student, name)}: choose a teacher of the same size, or pass {option} 0"
            )


def build_student(
    request: TrainRequest,
    objective: Objective,
    stock_model: PreTrainedModel | None,
    rows: Any,
    fit_tokens: int,
    stage: Stage,
    device: torch.device,
    warm_start: bool,
    config_fields: dict[str, Any],
) -> PreTrainedModel:
    """The model to train, with a warm start from the stock model unless the run resumes from a checkpoint.

    `fit_tokens` is the number of training tokens that the recipe's fit ratio is a fraction of.
    """
    # In float32 whatever the files are in: in half precision, small optimizer updates round to nothing.
    options = {"dtype": torch.float32, **config_fields}
    if request.scheme is None:
        return load_model(objective, request.model, request.revision, **options)
    model = load_model(objective, request.model, request.revision, position_scheme=request.scheme, **options)
    trains_all = request.trainable == "all"
    absorbs_mean = request.recipe.absorb_table_mean and trains_all
    ratio = resolve_fit_ratio(request.recipe, architecture_of(model), request.scheme)
    fits = ratio > 0 and objective is not Objective.CLASSIFICATION
    if not warm_start or not (absorbs_mean or fits):
        return model
    if stock_model is None:
        stock_model = load_model(objective, request.model, request.revision, **config_fields)
    model.to(device)
    if absorbs_mean:
        absorb_table_mean(stock_model, model, min(stage.length, model.config.max_position_embeddings))
    if fits:
        _fit_on_rows(stock_model, model, rows, math.ceil(ratio * fit_tokens), stage.length, projections=trains_all)
    return model


def _fit_on_rows(
    stock_model: PreTrainedModel, model: PreTrainedModel, rows: Any, tokens: int, length: int, projections: bool
) -> None:
    length = min(length, FIT_LENGTH, model.config.max_position_embeddings)
    batch_size = FIT_ROWS if architecture_of(model).rotary else FIT_ROWS_TABLE
    steps = min(math.ceil(tokens / (batch_size * length)), MAX_FIT_STEPS)
    input_ids = sample_input_ids(rows, steps * batch_size, length)
    if input_ids is None or len(input_ids) < batch_size:
        logger.warning("Skipping the attention fit: the training rows are too short or too few")
        return
    result = fit(stock_model, model, input_ids, projections=projections, steps=steps, rows=batch_size, progress=True)
    logger.info(f"Attention fit: from {result.before:.4f} to {result.after:.4f} nats per query")
    for parameter in model.parameters():  # the results of several processes may differ in the last bit
        parameter.data.copy_(broadcast(parameter.data))


def build_training_rows(
    request: TrainRequest,
    arguments: TrainingArguments,
    objective: Objective,
    stages: list[Stage],
    builders: list[RowBuilder],
    generator: PreTrainedModel | None,
) -> Any:
    """The rows to train on; `generator` samples them if the request asks for self-generated text."""
    if request.data == SELF_GENERATED:
        if generator is None:
            generator = load_model(objective, request.model, request.revision)
        num_rows = max(arguments.max_steps, 0) * rows_per_step(arguments) or MAX_SELF_GENERATED_ROWS
        length = min(max(stage.length for stage in stages), generator.config.max_position_embeddings)
        documents = self_generated_dataset(
            generator.to(arguments.device),
            Path(arguments.output_dir),
            request.self_generated_rows or min(num_rows, MAX_SELF_GENERATED_ROWS),
            length,
            {"model": request.teacher_model or request.model, "revision": str(request.revision)},
        )
    else:
        documents = load_text_dataset(request.data, request.split, request.streaming)
    datasets = [builder.build(documents) for builder in builders]
    if len(stages) == 1:
        return datasets[0]
    if request.streaming:
        raise PosEncError("Streamed data supports a single --train-length: train the stages one after the other")
    sizes = [(stage.steps or 0) * rows_per_step(arguments) for stage in stages]
    return StagedDataset(datasets, sizes, arguments.seed)
