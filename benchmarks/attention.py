"""One attention call under a scheme, compared with plain SDPA on the same queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import hf_posenc  # noqa: F401
from hf_posenc.attention.function import posenc_attention_forward

from .measure import Run

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
    "forget": "forget",
}


def build_model(scheme: Any, length: int, causal: bool, backend: str) -> Any:
    """One layer with random scheme parameters: a bias of zeros would be too easy."""
    common: dict[str, Any] = {"vocab_size": 8, "position_scheme": scheme, "bos_token_id": 1, "eos_token_id": 2}
    common["attn_implementation"] = backend
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


def random_states(batch: int, length: int, grad: bool) -> list[torch.Tensor]:
    """Random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, HEADS, length, HEAD_SIZE)
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(3)]


def runs(names: list[str], length: int, causal: bool, batch: int, padded: bool, grad: bool) -> dict[str, Run]:
    """Plain SDPA and each scheme; with `grad`, forward and backward."""
    query, key, value = random_states(batch, length, grad)
    hidden_states = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(batch, length, dtype=torch.long)
    if padded:
        for row in range(1, batch):
            mask[row, : row * length // (2 * batch)] = 0
    visible = mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
    visible = visible & torch.ones(length, length).tril().bool() if causal else visible

    def finish(output: torch.Tensor) -> None:
        if grad:
            output.sum().backward()

    def plain_sdpa() -> None:
        options = {"attn_mask": visible} if padded else {"is_causal": causal}
        finish(torch.nn.functional.scaled_dot_product_attention(query, key, value, **options))

    def with_scheme(scheme: Any, backend: str) -> Run:
        model = build_model(scheme, length, causal, backend)
        attention = model.h[0].attn if causal else model.encoder.layer[0].attention.self
        inputs = {"inputs_embeds": torch.zeros(batch, length, 1).expand(-1, -1, WIDTH)}
        if padded:
            inputs["attention_mask"] = mask
        positions = model.prepare_inputs(inputs).positions
        layer = attention.layer_schemes(positions)
        gates = attention.token_gates(layer, hidden_states, positions)
        if gates is not None:  # computed within the timed call
            layer = layer._replace(gates=gates)

        def run() -> None:
            with torch.set_grad_enabled(grad):
                output, _ = posenc_attention_forward(
                    attention, query, key, value, visible if padded else None, posenc=layer, scaling=HEAD_SIZE**-0.5
                )
                finish(output)

        return run

    candidates: dict[str, Run] = {"plain SDPA": plain_sdpa}
    for name in names:
        scheme = name.removesuffix(", eager")
        candidates[name] = with_scheme(SCHEMES[scheme], "sdpa" if scheme == name else "eager")
    return candidates
