"""Greedy decoding with a cache, one token at a time: how long new tokens take, behind a short prompt or a long one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from .models import gpt2, llama

PROMPT = 16
FAMILIES: dict[str, Callable[..., Any]] = {"GPT-2": gpt2, "LLaMA": llama}
SCHEMES = ("rope", "alibi", "t5")


def runs(family: str, new_tokens: int) -> dict[str, Callable[[], object]]:
    """The stock model and the schemes, each generating from the same prompt."""
    build = FAMILIES[family]
    prompt = torch.randint(3, 900, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def generating(scheme: str | None) -> Callable[[], object]:
        model = build(PROMPT + new_tokens, scheme, head=True).eval()
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None

        def run() -> object:
            return model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)

        return run

    return {family: generating(None), **{f"{family} + {scheme}": generating(scheme) for scheme in SCHEMES}}


def runs_behind(
    builders: dict[str, Callable[[int], Any]], length: int, new_tokens: int
) -> dict[str, Callable[[], object]]:
    """Models without a head behind a cache of `length` tokens, filled beforehand; only the new tokens are timed."""
    prompt = torch.randint(3, 900, (1, length), generator=torch.Generator().manual_seed(0))

    def decoding(model: Any) -> Callable[[], object]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True)

        def run() -> None:
            with torch.no_grad():
                for _ in range(new_tokens):
                    model(prompt[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-new_tokens)

        return run

    return {name: decoding(build(length + new_tokens).eval()) for name, build in builders.items()}
