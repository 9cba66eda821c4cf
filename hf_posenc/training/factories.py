"""Build the components of a training run: config, tokenizer, teacher, student and datasets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from ..checkpoints import load_model, load_tokenizer, read_config, read_shards
from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import ARCHITECTURES, max_positions, plan_schemes, refuse, with_scheme
from ..spec import NO_POSITIONS
from ..text_data import load_text_dataset, translate_data_errors
from .argument_checks import check_metric
from .arguments import SELF_GENERATED, Stage, TrainRequest, rows_per_step
from .attention_targets import place_attention
from .data import SELF_EVAL_FILE, RowBuilder, concatenate_stages, limit_tokens, self_generated_dataset
from .fingerprints import MODEL, TEACHER, digest, fingerprint_checkpoints
from .objectives import AUTO_CLASSES, Labels, Objective, infer_objective
from .optimizer import widen_trained_parameters
from .position_collators import POSITION_COLLATORS, DataCollatorWithPositions, check_reads_positions
from .sharding import is_sharded, whole_weights
from .source_files import check_companions
from .stock_start import start_from_stock_model
from .teacher import SpecialTokens, Teacher

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)
MAX_SELF_GENERATED_ROWS, SELF_EVAL_ROWS, SELF_EVAL_SEED = 4096, 8, 1
"""The text to evaluate on has another seed than the text to train on."""


def load_config(request: TrainRequest) -> PreTrainedConfig:
    """The config of the checkpoint to train. Raises PosEncError if its weights or the scheme cannot be used."""
    config = read_config(request.model, request.revision)
    is_variant = isinstance(config, VariantConfig)
    if is_variant and request.scheme is not None:
        option = "--recipe" if request.scheme == request.recipe.scheme else "--scheme"
        raise PosEncError(
            f"{request.model} already has the position scheme {config.position_scheme!r}: leave out {option} to train "
            "it, or start from the stock checkpoint"
        )
    if not is_variant and config.model_type not in ARCHITECTURES:
        raise refuse(config.model_type, request.model)
    if not is_variant and request.scheme is None:
        raise PosEncError(f"{request.model} is a stock model: choose its new position scheme with --scheme")
    directory = Path(request.model).expanduser()
    if directory.is_dir():
        read_shards(directory)
    variant = config if request.scheme is None else with_scheme(config, request.scheme)
    architecture = ARCHITECTURES[variant.stock_class.model_type]
    if request.recipe.scheme == NO_POSITIONS and not architecture.is_causal(config):
        raise PosEncError(
            f"{request.model} is an encoder, which sees no order without positions: dropping them is for causal "
            "models. Choose another --recipe"
        )
    with torch.device("meta"):
        plan_schemes(architecture, variant)
    return config


class RunBuilder:
    """Builds what a run needs, and raises PosEncError before any training if something does not fit together."""

    def __init__(self, request: TrainRequest, arguments: TrainingArguments, stages: list[Stage]) -> None:
        self.request, self.arguments, self.stages = request, arguments, stages
        self.config = load_config(request)
        check_companions(request, is_main_process=arguments.process_index == 0)
        self.objective = infer_objective(self.config, request.task)
        check_metric(arguments, self.objective)
        self.packing = self.objective is Objective.CAUSAL if request.packing is None else request.packing
        self._check_data()
        self.fingerprints = fingerprint_checkpoints(request)
        self.tokenizer = self._load_tokenizer()
        self.labels: Labels | None = None
        if self.objective is Objective.CLASSIFICATION:
            documents = load_text_dataset(request.data, request.split, request.streaming)
            with translate_data_errors(request.data):
                self.labels = Labels.find(self.config, documents, request.label_column)
        model_type = getattr(self.config, "stock_class", self.config).model_type
        first_position = ARCHITECTURES[model_type].first_position(self.config)
        self.row_builders = [
            RowBuilder(
                self.tokenizer,
                stage.length,
                self.objective,
                self.packing,
                text_column=request.text_column,
                label_column=request.label_column,
                labels=self.labels,
                first_position=first_position,
                vocab_size=getattr(self.config, "vocab_size", None),
            )
            for stage in stages
        ]
        self.data_collator = self.objective.data_collator(self.tokenizer, self.packing, request.mlm_probability)
        self.train_collator = self._position_collator(first_position)
        self.teacher = self._load_teacher()
        self._stock_model = self.teacher.model if self.teacher is not None and not request.teacher_model else None
        self._has_new_head = self.teacher is not None and self.teacher.has_new_head
        if self.labels and self.teacher and self.teacher.has_new_head and not request.recipe.loss_weights.label:
            self.teacher = None  # it knows nothing about the classes
        self._check_teacher()

    def _position_collator(self, first_position: int) -> DataCollatorWithPositions | None:
        """The collator that chooses positions for the training rows, if `--positions` is set."""
        if self.request.positions is None:
            return None
        target_length, length = self.request.target_length, max(stage.length for stage in self.stages)
        assert target_length is not None
        if target_length < length:
            raise PosEncError(
                f"--target-length {target_length} is below the {length} tokens of --train-length: raise it"
            )
        seed = self.arguments.data_seed if self.arguments.data_seed is not None else self.arguments.seed
        options = {"seed": seed, "first_position": first_position, "packed": True}
        return POSITION_COLLATORS[self.request.positions](target_length, self.data_collator, **options)

    def _check_data(self) -> None:
        if self.request.data == SELF_GENERATED and self.objective is not Objective.CAUSAL:
            raise PosEncError("Only causal models can generate their own text: pass --data with text")
        if self.request.streaming and len(self.stages) > 1:
            raise PosEncError("Streamed data supports a single --train-length: train the stages one after the other")
        if self.request.tokens is not None and len(self.stages) > 1:
            raise PosEncError("--tokens supports a single --train-length: give each stage its steps instead")
        if self.request.streaming and self.arguments.max_steps <= 0:
            raise PosEncError("Streamed data has no known size: set --max-steps")

    def _load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None if the model has no tokenizer and needs none, because it generates its own text."""
        request = self.request
        try:
            tokenizer, problem = load_tokenizer(request.model, request.revision), "it has no tokenizer files"
        except PosEncError as error:
            tokenizer, problem = None, str(error)
        # Without any files, transformers builds a tokenizer that knows special tokens only.
        if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
            if request.data == SELF_GENERATED and request.eval_data is None:
                logger.warning(f"The variant will have no tokenizer: cannot load one from {request.model} ({problem})")
                return None
            raise PosEncError(
                f"Cannot load a tokenizer from {request.model}: {problem}. Save the model's tokenizer there"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        return tokenizer

    def _load_model(
        self, source: str, revision: str | None = None, **options: Any
    ) -> tuple[PreTrainedModel, list[str]]:
        """Load a checkpoint with the objective's head, and the labels of the run; see `load_model`."""
        if self.labels is not None:
            names = self.labels.names
            options |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
        with whole_weights(self.arguments):
            return load_model(source, AUTO_CLASSES[self.objective], revision, **options)

    def _load_teacher(self) -> Teacher | None:
        """The model to distill from: the stock model, or the one that the request names."""
        request = self.request
        if not request.recipe.teacher or (request.scheme is None and request.teacher_model is None):
            return None  # the stock model of a variant is unknown
        source, revision = (request.teacher_model, None) if request.teacher_model else (request.model, request.revision)
        options = {}
        is_stock = not isinstance(read_config(source, revision), VariantConfig)
        if self.packing and self.objective is not Objective.CAUSAL and is_stock:
            # A stock encoder does not separate packed documents; with its own table as a scheme it does.
            options["position_scheme"] = "learned"
        model, missing = self._load_model(source, revision, **options)
        weights = request.recipe.loss_weights
        for name, weight, option in (
            ("vocab_size", self.objective.predicts_tokens and weights.kl, "--kl-loss-weight"),
            ("hidden_size", weights.hidden, "--hidden-loss-weight"),
            ("num_hidden_layers", weights.hidden, "--hidden-loss-weight"),
        ):
            teacher_size, student_size = getattr(model.config, name), getattr(self.config, name)
            if weight and teacher_size != student_size:
                raise PosEncError(
                    f"The teacher {source} has {name} {teacher_size}, but {request.model} has {student_size}: choose a "
                    f"teacher of the same size, or pass {option} 0"
                )
        special_tokens = SpecialTokens()
        if self.objective is not Objective.CAUSAL and self.tokenizer is not None:
            special_tokens = SpecialTokens(self.tokenizer.cls_token_id, self.tokenizer.sep_token_id)
        return Teacher(model, bool(missing), special_tokens)

    def _check_teacher(self) -> None:
        has_no_head = self.objective is Objective.FEATURE_EXTRACTION
        if self.teacher is None:
            if has_no_head:
                raise PosEncError(
                    f"{self.request.model} has no head, so it can only learn a teacher's hidden states: leave the "
                    "teacher on, or set --task"
                )
            return
        length = max(stage.length for stage in self.stages)
        if length > self.teacher.max_length and self.request.data == SELF_GENERATED:
            raise PosEncError(
                f"Rows of {length} tokens are longer than the {self.teacher.max_length} that the model can generate: "
                "lower --train-length, or pass --data with text"
            )
        if self.arguments.label_smoothing_factor:
            raise PosEncError("--label-smoothing-factor has no effect with a teacher: leave one of them out")

    def build_rows(self) -> Dataset | IterableDataset:
        """The rows to train on."""
        request, step_rows = self.request, rows_per_step(self.arguments)
        if request.data == SELF_GENERATED:
            model = self.teacher.model if self.teacher else self._load_model(request.model, request.revision)[0]
            num_rows = max(self.arguments.max_steps, 0) * step_rows or MAX_SELF_GENERATED_ROWS
            documents = self_generated_dataset(
                model.to(self.arguments.device),
                Path(self.arguments.output_dir),
                request.self_generated_rows or min(num_rows, MAX_SELF_GENERATED_ROWS),
                min(max(stage.length for stage in self.stages), max_positions(model.config)),
                self._describe_source(TEACHER if request.teacher_model else MODEL),
            )
        else:
            documents = load_text_dataset(request.data, request.split, request.streaming)
        with translate_data_errors(request.data):
            datasets = [builder.build(documents) for builder in self.row_builders]
        if len(datasets) == 1:
            return limit_tokens(datasets[0], request.tokens, self.stages[0].length)
        self.arguments.train_sampling_strategy = "sequential"  # the rows are shuffled within each stage
        sizes = [(stage.steps or 0) * step_rows for stage in self.stages]
        return concatenate_stages(datasets, sizes, self.arguments.seed)

    def build_eval_rows(self) -> Dataset | IterableDataset | None:
        """The rows to evaluate on, of the last stage's length."""
        if self.request.eval_data is None:
            return None
        documents = load_text_dataset(self.request.eval_data, self.request.eval_split)
        with translate_data_errors(self.request.eval_data):
            return self.row_builders[-1].build(documents)

    def build_self_eval_rows(self) -> Dataset | IterableDataset | None:
        """Rows sampled from the stock model, to evaluate on besides the evaluation data."""
        request, config = self.request, self.config
        num_rows = request.self_eval_rows
        has_start = config.bos_token_id is not None or config.eos_token_id is not None
        is_stock_decoder = self.objective is Objective.CAUSAL and request.scheme is not None and has_start
        if not is_stock_decoder or is_sharded(self.arguments):
            if num_rows:
                raise PosEncError(
                    "--self-eval-rows is for stock causal models with a bos_token_id, without FSDP or DeepSpeed: leave "
                    "it out"
                )
            return None
        if num_rows is None:
            num_rows = SELF_EVAL_ROWS if request.eval_data is not None else 0
        if not num_rows:
            return None
        model = self._stock_model or self._load_model(request.model, request.revision)[0]
        length = min(self.stages[-1].length, max_positions(model.config))
        documents = self_generated_dataset(
            model.to(self.arguments.device),
            Path(self.arguments.output_dir),
            num_rows,
            length,
            self._describe_source(MODEL),
            name=SELF_EVAL_FILE,
            seed=SELF_EVAL_SEED,
        )
        return dataclasses.replace(self.row_builders[-1], length=length).build(documents)

    def _describe_source(self, role: str) -> dict[str, str]:
        """Where self-generated text comes from, for the metadata of its file."""
        model = self.request.teacher_model if role == TEACHER else self.request.model
        weights = digest(self.fingerprints[role])
        return {"model": str(model), "revision": str(self.request.revision), "sha256": weights}

    def load_original(self) -> PreTrainedModel | None:
        """The stock model to compare with, if it has a trained head and can read the rows."""
        request, separates_documents = self.request, self.objective is Objective.CAUSAL or not self.packing
        if request.scheme is None or is_sharded(self.arguments):
            return None
        if self._stock_model is not None:
            model, is_untrained = self._stock_model, self._has_new_head
        elif separates_documents:
            model, missing = self._load_model(request.model, request.revision)
            is_untrained = bool(missing)
        else:
            return None
        return None if is_untrained or self.stages[-1].length > max_positions(model.config) else model

    def build_student(
        self, rows: Dataset | IterableDataset, warm_start: bool, measure: Callable[[str, PreTrainedModel], None]
    ) -> PreTrainedModel:
        """The model to train, with a warm start from the stock model unless the run resumes from a checkpoint.

        `measure` is called with the model before and after the warm start.
        """
        request = self.request
        options = {} if request.scheme is None else {"position_scheme": request.scheme}
        model, missing = self._load_model(request.model, request.revision, dtype=self._student_dtype(), **options)
        if missing:
            logger.warning(f"{request.model} has no weights for {', '.join(missing)}: they start at random")
        widen_trained_parameters(model)
        if self.labels is not None and self.tokenizer is not None:
            # Decoders classify by the last token that is not padding.
            for classifier in (model, self.teacher.model if self.teacher is not None else model):
                if getattr(classifier.config, "pad_token_id", None) is None:
                    classifier.config.pad_token_id = self.tokenizer.pad_token_id
        if self.train_collator is not None:
            check_reads_positions(model, self.train_collator)
        if request.scheme is None or not warm_start:
            return model
        sharded, device = is_sharded(self.arguments), self.arguments.device
        if not sharded:
            model.to(device)
        measure("swapped", model)
        if not request.recipe.starts_from_stock_model:
            return model
        stock_model = self._stock_model or self._load_model(request.model, request.revision)[0]
        if sharded:  # neither model need fit into the memory of one device
            place_attention(model, device)
        else:
            stock_model.to(device)
        fits = self.objective is not Objective.CLASSIFICATION
        tokens_seen = self._rows_seen(rows) * self.stages[0].length if fits else 0
        start_from_stock_model(
            stock_model, model, rows, request.recipe, request.trainable, self.stages[0].length, tokens_seen
        )
        measure("started", model)
        return model.cpu() if sharded else model

    def _student_dtype(self) -> torch.dtype:
        """The dtype to load the student in: float32, or bfloat16 for bfloat16 weights that will not be trained.

        In half precision, small optimizer updates round to nothing. Shards need a single dtype.
        """
        is_bfloat16 = self.config.dtype in (torch.bfloat16, "bfloat16")
        is_frozen = self.request.trainable != "all" and self.objective is not Objective.CLASSIFICATION
        return torch.bfloat16 if is_bfloat16 and is_frozen and not is_sharded(self.arguments) else torch.float32

    def _rows_seen(self, rows: Dataset | IterableDataset) -> int:
        """How many rows the training will see, counting each as often as it is used."""
        steps, step_rows = self.arguments.max_steps, rows_per_step(self.arguments)
        if steps <= 0:
            steps = math.ceil(math.ceil(len(rows) / step_rows) * self.arguments.num_train_epochs)
        return steps * step_rows
