"""A tokenizer of words for tiny models: word `w17` is token 17. The first five tokens are special."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support import tiny_models as tiny

SPECIAL = ("<pad>", "<first>", "<last>", "<unknown>", "<mask>")
FIRST_WORD = len(SPECIAL)


def tokenizer(encoder: bool = False) -> PreTrainedTokenizerFast:
    """With ends around each text for an encoder; without for a decoder."""
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
    """Words that have an order to learn: each is mostly the one before plus a step that stays for a while."""
    chance = random.Random(seed)
    place, step, found = 0, 1, []
    for _ in range(words):
        step = chance.choice((1, 2, 3)) if chance.random() < 0.1 else step
        place = (place + step) % (tiny.VOCABULARY - FIRST_WORD)
        found.append(f"w{place + FIRST_WORD}")
    return " ".join(found)


def saved(architecture: str, directory: Path, **changes: Any) -> Path:
    """A stock checkpoint with its tokenizer."""
    import torch

    tiny.model(architecture, dtype=torch.float32, **changes).save_pretrained(directory)
    tokenizer(encoder=architecture == "bert").save_pretrained(directory)
    return directory
