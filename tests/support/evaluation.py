"""Checkpoints with a word-level tokenizer, and fake models whose predictions are known exactly."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from hf_posenc.evaluation.metrics import QUESTION
from hf_posenc.evaluation.models import EvaluatedModel
from hf_posenc.evaluation.settings import EvaluationSettings, ProcessGroup
from tests.support import tiny_models as tiny

BOS, EOS, MASK, FIRST_QUESTION_WORD = 1, 2, 3, 46
SPECIAL_TOKENS = {"unk_token": "[U]", "bos_token": "[B]", "eos_token": "[E]", "mask_token": "[M]"}
SINGLE_PROCESS = ProcessGroup(torch.device("cpu"), progress=False)


def make_tokenizer(add_special_tokens: bool = True, digits: bool = False) -> PreTrainedTokenizerFast:
    """Maps the word w5 to token 5 and so on; with `digits` it also knows the passkey question and single digits."""
    vocabulary = {f"w{number}": number for number in range(tiny.VOCABULARY)}
    for number, special in enumerate(SPECIAL_TOKENS.values()):
        vocabulary[special] = vocabulary.pop(f"w{number}")
    if digits:
        for number, word in enumerate([*QUESTION.split(), *"0123456789"], FIRST_QUESTION_WORD):
            vocabulary[word] = vocabulary.pop(f"w{number}")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[U]"))
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    split_words = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_words, split_digits]) if digits else split_words
    if add_special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[B] $A [E]", special_tokens=[("[B]", BOS), ("[E]", EOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def to_text(ids: torch.Tensor) -> str:
    return " ".join(f"w{token}" for token in ids.flatten().tolist())


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(4, FIRST_QUESTION_WORD, (count,), generator=torch.Generator().manual_seed(seed))


def save_checkpoint(
    directory: Path, architecture: str, scheme: Any = None, seed: int = 0, add_special_tokens: bool = True
) -> str:
    model = tiny.model(architecture, scheme, torch.float32, seed)
    model.save_pretrained(directory)
    make_tokenizer(add_special_tokens).save_pretrained(directory)
    return str(directory)


def evaluated_model(
    model: Any,
    token_ids: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast | None = None,
    causal: bool = True,
    **settings: Any,
) -> EvaluatedModel:
    task, options = "causal-lm" if causal else "masked-lm", EvaluationSettings(**settings)
    return EvaluatedModel("model", model, tokenizer, task, token_ids, options, SINGLE_PROCESS)


class Base(nn.Module):
    """A base model whose last hidden states are given by a function."""

    def __init__(self, states: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.states = states

    def forward(self, input_ids_BN: torch.Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.states(input_ids_BN))


class CopyModel(nn.Module):
    """Predicts what followed the last four tokens when they occurred before, within a limited context."""

    def __init__(self, context: int = 10**9) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(model_type="llama_copy", vocab_size=tiny.VOCABULARY)
        self.base_model, self.lm_head = Base(self.states), nn.Identity()
        self.context = context
        self.device = torch.device("cpu")

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids_BN: torch.Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.base_model(input_ids_BN).last_hidden_state))

    def states(self, input_ids_BN: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*input_ids_BN.shape, tiny.VOCABULARY)
        for row, ids in enumerate(input_ids_BN.tolist()):
            for position in range(1, len(ids)):
                logits[row, position, self.predict(ids[: position + 1])] = 9.0
        return logits

    def predict(self, ids: list[int]) -> int:
        for position in range(len(ids) - 2, max(len(ids) - self.context, 2), -1):
            if ids[position - 3 : position + 1] == ids[-4:]:
                return ids[position + 1]
        return 0
