"""A word-level tokenizer for tiny models: the word `w17` is token 17. The first five tokens are special."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support import tiny_models as tiny

SPECIAL = ("<pad>", "<first>", "<last>", "<unknown>", "<mask>")
FIRST_WORD = len(SPECIAL)


def tokenizer(encoder: bool = False) -> PreTrainedTokenizerFast:
    """For an encoder, with special tokens around each text."""
    words = {name: number for number, name in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(FIRST_WORD, tiny.VOCABULARY)}
    pad, first, last, unknown, mask = SPECIAL
    backend = Tokenizer(models.WordLevel(words, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if encoder:
        ends = [(first, words[first]), (last, words[last])]
        backend.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ends)
    named = {"pad": pad, "unk": unknown, "mask": mask, "bos": first, "eos": last, "cls": first, "sep": last}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in named.items()}
    )


def text(words: int, seed: int = 0) -> str:
    """Text with an order to learn: each word is the previous one plus a step that changes now and then."""
    generator = random.Random(seed)
    index, step, result = 0, 1, []
    for _ in range(words):
        step = generator.choice((1, 2, 3)) if generator.random() < 0.1 else step
        index = (index + step) % (tiny.VOCABULARY - FIRST_WORD)
        result.append(f"w{index + FIRST_WORD}")
    return " ".join(result)


def saved(architecture: str, directory: Path, **changes: Any) -> Path:
    """Save a stock checkpoint with its tokenizer."""
    tiny.model(architecture, dtype=torch.float32, **changes).save_pretrained(directory)
    tokenizer(encoder=architecture == "bert").save_pretrained(directory)
    return directory
