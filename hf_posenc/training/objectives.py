"""Training objectives, inferred from the head that a checkpoint was saved with, and the labels of classifiers."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from transformers import (
    DataCollator,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from ..errors import PosEncError
from ..patches import find_auto_class

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

MAX_LABELS = 10_000
"""A column with larger integers does not hold class labels."""


class Objective(enum.Enum):
    """What a model is trained to do. The values are those of `--task`."""

    CAUSAL = "causal-lm"
    MASKED = "masked-lm"
    FEATURE_EXTRACTION = "feature-extraction"
    """A model without a head: it can only learn to reproduce a teacher's hidden states."""
    CLASSIFICATION = "classification"

    @property
    def predicts_tokens(self) -> bool:
        """Whether the loss is a mean over tokens, so that its exponential is a perplexity."""
        return self in (Objective.CAUSAL, Objective.MASKED)

    def data_collator(
        self, tokenizer: PreTrainedTokenizerBase | None, packing: bool, mlm_probability: float
    ) -> DataCollator:
        """The collator for rows of this objective."""
        if self is Objective.CAUSAL and packing:  # rows are full and come with labels
            return default_data_collator
        assert tokenizer is not None
        if self is Objective.MASKED:
            return DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability)
        if self is Objective.CAUSAL:
            return DataCollatorForLanguageModeling(tokenizer, mlm=False)
        return DataCollatorWithPadding(tokenizer)


AUTO_CLASSES = {
    Objective.CAUSAL: "AutoModelForCausalLM",
    Objective.MASKED: "AutoModelForMaskedLM",
    Objective.CLASSIFICATION: "AutoModelForSequenceClassification",
    Objective.FEATURE_EXTRACTION: "AutoModel",
}
"""The Auto class of each objective; heads are looked up in this order."""


def infer_objective(config: PreTrainedConfig, task: str | None = None) -> Objective:
    """The objective of a task if one is given, else that of the checkpoint's head."""
    tasks = [objective.value for objective in Objective]
    if task is not None:
        if task not in tasks:
            raise PosEncError(f"Unknown task {task!r}; expected one of {tasks}")
        return Objective(task)
    for name in config.architectures or []:
        auto_class = find_auto_class([name], list(AUTO_CLASSES.values()))
        if auto_class is None:
            raise PosEncError(
                f"There is no training task for the head of {name}, and it would be dropped: set --task to one of "
                f"{tasks} to train the rest of the model"
            )
        return next(objective for objective in Objective if AUTO_CLASSES[objective] == auto_class)
    return Objective.FEATURE_EXTRACTION


@dataclasses.dataclass(frozen=True)
class Labels:
    """The class names of a classifier, by class id."""

    names: tuple[str, ...]

    def class_id(self, label: object) -> int:
        """The id of a label, which is a class name or a class id."""
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, (bool, int)) and 0 <= label < len(self.names):
            return int(label)
        raise PosEncError(
            f"Unknown label {label!r}; expected one of the {len(self.names)} classes {self.names[:8]} or a class id"
        )

    @classmethod
    def find(cls, config: PreTrainedConfig, documents: Dataset | IterableDataset, column: str) -> Labels:
        """The labels of the checkpoint's head if it is a classifier, else those in the data."""
        columns = list(documents.column_names or next(iter(documents)))
        if column not in columns:
            raise PosEncError(f"The data has no label column {column!r}; set --label-column to one of {columns}")
        if find_auto_class(config.architectures or [], [AUTO_CLASSES[Objective.CLASSIFICATION]]):
            return cls(tuple(config.id2label[number] for number in range(config.num_labels)))
        names = getattr((documents.features or {}).get(column), "names", None)
        if names:
            return cls(tuple(names))
        if not hasattr(documents, "__len__"):
            raise PosEncError(
                "The number of classes in a streamed dataset is unknown: leave out --streaming, or start from a "
                "checkpoint with a classification head"
            )
        values = documents.unique(column)
        if all(isinstance(value, str) for value in values) and 1 < len(values) <= MAX_LABELS:
            return cls(tuple(sorted(values)))
        if all(isinstance(value, (bool, int)) and 0 <= value < MAX_LABELS for value in values) and any(values):
            return cls(tuple(f"LABEL_{number}" for number in range(int(max(values)) + 1)))
        raise PosEncError(
            f"Column {column!r} must hold class names or class ids from 0, of at least two classes; got {values[:8]!r}"
        )


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy of a classifier, for `Trainer(compute_metrics=...)`."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}
