"""Greedy decoding with a cache, one token at a time, after a short or a long prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import DynamicCache

from .measure import Run
from .models import Builder, Model, gpt2, llama

PROMPT_LENGTH = 16
FAMILIES: dict[str, Callable[..., Model]] = {"GPT-2": gpt2, "LLaMA": llama}
SCHEMES = ("rope", "alibi", "t5")


def generation_runs(family: str, new_tokens: int) -> dict[str, Run]:
    """The stock model and its variants, each generating from the same short prompt."""
    build = FAMILIES[family]
    prompt = _random_prompt(PROMPT_LENGTH)

    def generation(scheme: str | None) -> Run:
        model = build(PROMPT_LENGTH + new_tokens, scheme, head=True).eval()
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return lambda: model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)

    return {family: generation(None), **{f"{family} + {scheme}": generation(scheme) for scheme in SCHEMES}}


def cached_runs(builders: dict[str, Builder], length: int, new_tokens: int) -> dict[str, Run]:
    """Models without a head, decoding after `length` cached tokens. Only the new tokens are timed."""
    prompt = _random_prompt(length)

    def decoding(model: Model) -> Run:
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


def _random_prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 900, (1, length), generator=torch.Generator().manual_seed(0))
