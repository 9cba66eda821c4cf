"""What a model is trained to do: chosen by the head that its checkpoint was saved with, unless a task is asked for."""

from __future__ import annotations

import enum
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
)


class Objective(enum.Enum):
    CAUSAL = "causal-lm"
    MASKED = "masked-lm"
    STATES = "states"
    """A model without a head: there is nothing to learn but what a teacher's states are."""
    CLASSIFICATION = "classification"

    @property
    def auto_class(self) -> Any:
        return _AUTO[self]

    @property
    def predicts_tokens(self) -> bool:
        return self in (Objective.CAUSAL, Objective.MASKED)

    def collator(self, tokenizer: Any, packing: bool, mask_share: float) -> Any:
        """What makes a batch of rows. Packed rows of a causal model come with their labels, and need no padding."""
        if self is Objective.CAUSAL and packing:
            return default_data_collator
        if self.predicts_tokens:
            share = mask_share if self is Objective.MASKED else None
            return DataCollatorForLanguageModeling(tokenizer, mlm=share is not None, mlm_probability=share)
        return DataCollatorWithPadding(tokenizer)


_AUTO = {
    Objective.CAUSAL: AutoModelForCausalLM,
    Objective.MASKED: AutoModelForMaskedLM,
    Objective.STATES: AutoModel,
    Objective.CLASSIFICATION: AutoModelForSequenceClassification,
}
_ENDINGS = {
    ("ForCausalLM", "LMHeadModel"): Objective.CAUSAL,
    ("ForMaskedLM", "ForPreTraining"): Objective.MASKED,
    ("ForSequenceClassification",): Objective.CLASSIFICATION,
}


def objective_of(config: Any, task: str | None = None) -> Objective:
    """The task that is asked for; else that of the head in the checkpoint; else none but to be as the teacher is."""
    if task is not None:
        try:
            return Objective(task)
        except ValueError:
            raise ValueError(f"there is no task {task!r}; there are {[found.value for found in Objective]}") from None
    for name in config.architectures or []:
        for endings, objective in _ENDINGS.items():
            if name.endswith(endings):
                return objective
        if not name.endswith("Model") or name.endswith("HeadsModel"):
            raise ValueError(
                f"{name} has a head that there is no task for, and it would be left out: name a --task of "
                f"{[found.value for found in Objective]} to train the rest"
            )
    return Objective.STATES
