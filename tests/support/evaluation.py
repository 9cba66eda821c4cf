"""Checkpoints with a tokenizer of words, and stand-ins for models that know exactly what they do."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from hf_posenc.evaluation.crew import Crew
from hf_posenc.evaluation.passkey import LEAD
from hf_posenc.evaluation.subject import Subject
from hf_posenc.evaluation.windows import Frame
from hf_posenc.training.objective import Objective
from tests.support import tiny_models as tiny

BEGIN, END, MASK, FIRST_OTHER = 1, 2, 3, 46
SPECIAL = {"unk_token": "[U]", "bos_token": "[B]", "eos_token": "[E]", "mask_token": "[M]"}
ALONE = Crew(0, 1, torch.device("cpu"), progress=False)


def tokenizer(framed: bool = True, digits: bool = False) -> Any:
    """Words w4, w5, ... are their numbers. Framed: with a token before and one behind each text. With digits: it also
    knows what a question for a passkey is made of."""
    words = {f"w{number}": number for number in range(tiny.VOCABULARY)}
    for number, special in enumerate(SPECIAL.values()):
        words[special] = words.pop(f"w{number}")
    if digits:
        for number, word in enumerate([*LEAD.split(), *"0123456789"], FIRST_OTHER):
            words[word] = words.pop(f"w{number}")
    built = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    split = pre_tokenizers.Digits(individual_digits=True)
    spaces = pre_tokenizers.WhitespaceSplit()
    built.pre_tokenizer = pre_tokenizers.Sequence([spaces, split]) if digits else spaces
    if framed:
        built.post_processor = processors.TemplateProcessing(
            single="[B] $A [E]", special_tokens=[("[B]", BEGIN), ("[E]", END)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=built, **SPECIAL)


def words(ids: torch.Tensor) -> str:
    return " ".join(f"w{token}" for token in ids.flatten().tolist())


def text_ids(count: int, seed: int = 0) -> torch.Tensor:
    """No special tokens among them."""
    return torch.randint(4, FIRST_OTHER, (count,), generator=torch.Generator().manual_seed(seed))


def checkpoint(directory: Path, architecture: str, scheme: Any = None, seed: int = 0, framed: bool = True) -> str:
    model = tiny.model(architecture, scheme, torch.float32, seed)
    model.save_pretrained(directory)
    tokenizer(framed).save_pretrained(directory)
    return str(directory)


def subject(model: Any, stream: torch.Tensor, words: Any = None, causal: bool = True) -> Subject:
    objective = Objective.CAUSAL if causal else Objective.MASKED
    return Subject("it", model, words, objective, stream, Frame.of(words, causal), torch.device("cpu"))


class Copycat(nn.Module):
    """Predicts what stood behind the last four tokens when they were seen before, not further back than it can see."""

    def __init__(self, sees: int = 10**9) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(model_type="llama", vocab_size=tiny.VOCABULARY)
        self.lm_head = nn.Identity()
        self.sees = sees
        self.weight = nn.Parameter(torch.zeros(1))

    @property
    def base_model(self) -> Any:
        def read(ids_BN: torch.Tensor, use_cache: bool = False) -> Any:
            states = torch.zeros(*ids_BN.shape, tiny.VOCABULARY)
            for row, ids in enumerate(ids_BN.tolist()):
                for place in range(1, len(ids)):
                    states[row, place, self.next(ids[: place + 1])] = 9.0
            return types.SimpleNamespace(last_hidden_state=states)

        return read

    def next(self, ids: list[int]) -> int:
        for place in range(len(ids) - 2, max(len(ids) - self.sees, 2), -1):
            if ids[place - 3 : place + 1] == ids[-4:]:
                return ids[place + 1]
        return 0
