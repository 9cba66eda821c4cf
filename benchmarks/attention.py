"""Attention alone under a scheme, as the engine runs it, against plain SDPA on the same queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import hf_posenc  # noqa: F401
from hf_posenc.attention.function import posenc_attention_forward

HEADS, HEAD_SIZE = 12, 64
WIDTH = HEADS * HEAD_SIZE
SCHEMES: dict[str, Any] = {
    "alibi": "alibi",
    "t5": "t5",
    "kerple": "kerple",
    "sandwich": "sandwich",
    "fire": "fire",
    "tupe": {"type": "tupe", "relative": False},
    "transformer_xl": "transformer_xl",
    "shaw (keys)": {"type": "shaw", "values": False},
    "shaw": "shaw",
    "deberta": {"type": "deberta", "buckets": 256},
    "cope": "cope",
}


def model_of(scheme: Any, length: int, causal: bool, how: str) -> Any:
    """One layer, whose engine is what is measured; parameters at random, since a bias of zeros would be no test."""
    common: dict[str, Any] = {"vocab_size": 8, "position_scheme": scheme, "bos_token_id": 1, "eos_token_id": 2}
    common["attn_implementation"] = how
    if causal:
        sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": length, "n_inner": 8}
        model: Any = GPT2Model(GPT2Config(**common, **sizes))
    else:
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 8}
        model = BertModel(BertConfig(**common, **sizes, max_position_embeddings=length), add_pooling_layer=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_scheme" in name:
                parameter.normal_(std=0.1).abs_()
    return model.eval()


def states(batch: int, length: int, grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, HEADS, length, HEAD_SIZE)
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(3)]


def runs(
    names: list[str], length: int, causal: bool, batch: int, padded: bool, grad: bool
) -> dict[str, Callable[[], Any]]:
    """Plain SDPA, and the engine under each scheme; with `grad`, forward and backward."""
    query, key, value = states(batch, length, grad)
    mask = torch.ones(batch, length, dtype=torch.long)
    if padded:
        for row in range(1, batch):
            mask[row, : row * length // (2 * batch)] = 0
    pairs = mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
    pairs = pairs & torch.ones(length, length).tril().bool() if causal else pairs

    def finish(output: torch.Tensor) -> None:
        if grad:
            output.sum().backward()

    def plain() -> None:
        how = {"attn_mask": pairs} if padded else {"is_causal": causal}
        finish(torch.nn.functional.scaled_dot_product_attention(query, key, value, **how))

    def under(scheme: Any, how: str) -> Callable[[], None]:
        model = model_of(scheme, length, causal, how)
        attention = model.h[0].attn if causal else model.encoder.layer[0].attention.self

        inputs = {"inputs_embeds": torch.zeros(batch, length, 1).expand(-1, -1, WIDTH)}
        if padded:
            inputs["attention_mask"] = mask
        posenc = model.prepare_inputs(inputs).positions

        def run() -> None:
            given = {"posenc": posenc, "scaling": HEAD_SIZE**-0.5}
            output, _ = posenc_attention_forward(attention, query, key, value, pairs if padded else None, **given)
            finish(output)

        def without_grad() -> None:
            with torch.no_grad():
                run()

        return run if grad else without_grad

    found = {"plain SDPA": plain}
    for name in names:
        scheme = name.removesuffix(", eager")
        found[name] = under(SCHEMES[scheme], "sdpa" if scheme == name else "eager")
    return found
