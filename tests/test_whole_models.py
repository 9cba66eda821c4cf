"""Whole models of transformers that are one of our architectures with a scheme: same weights, same numbers."""

from __future__ import annotations

import re

import pytest
import tiny
import torch
from transformers import BertModel, GPTNeoXConfig, GPTNeoXModel, LlamaModel, MPNetConfig, MPNetModel

LENGTH = 14


def filled(model: torch.nn.Module) -> torch.nn.Module:
    return tiny.randomise(model.to(torch.float64)).eval()


def renamed(state: dict[str, torch.Tensor], rules: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    for pattern, replacement in rules:
        state = {re.sub(pattern, replacement, name): tensor for name, tensor in state.items()}
    return state


def weighted(output: torch.Tensor) -> torch.Tensor:
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()


def test_mpnet_is_bert_with_learned_and_shared_t5() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 64}
    oracle = filled(MPNetModel(MPNetConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)))
    scheme = ["learned", {"type": "t5", "num_buckets": 32, "max_distance": 128}]
    model = BertModel(tiny.config("bert", max_position_embeddings=64, position_scheme=scheme)).to(torch.float64).eval()
    rules = [
        (r"attention\.attn\.q\b", "attention.self.query"),
        (r"attention\.attn\.k\b", "attention.self.key"),
        (r"attention\.attn\.v\b", "attention.self.value"),
        (r"attention\.attn\.o\b", "attention.output.dense"),
        (r"attention\.LayerNorm", "attention.output.LayerNorm"),
        (r"encoder\.relative_attention_bias\.weight", "position_scheme.1.table.weight"),
    ]
    missing, unexpected = model.load_state_dict(renamed(oracle.state_dict(), rules), strict=False)
    assert missing == ["embeddings.token_type_embeddings.weight"]
    assert not unexpected
    torch.nn.init.zeros_(model.embeddings.token_type_embeddings.weight)

    ids, places = tiny.tokens(2, LENGTH), torch.arange(2, LENGTH + 2)[None].expand(2, -1)
    expected = oracle(ids, position_ids=places).last_hidden_state
    found = model(ids, position_ids=places).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    weighted(expected).backward()
    weighted(found).backward()
    pairs = [
        (model.position_scheme[1].table.weight, oracle.encoder.relative_attention_bias.weight),
        (model.embeddings.position_embeddings.weight, oracle.embeddings.position_embeddings.weight),
        (model.encoder.layer[0].attention.self.key.weight, oracle.encoder.layer[0].attention.attn.k.weight),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-9)
        assert theirs.grad.abs().max() > 1e-3
    with torch.no_grad():
        model.position_scheme[1].table.weight[3] += 0.01
    assert (model(ids, position_ids=places).last_hidden_state - expected).abs().max() > 1e-5


def attention_of(model: torch.nn.Module, attention: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The attention weights of a model's first layer."""
    seen: list[torch.Tensor] = []
    hook = attention.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    with torch.no_grad():
        model(inputs_embeds=words)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_partial_rope_on_llama_turns_what_gpt_neox_turns(share: float) -> None:
    """The two differ in their norms and feed-forwards, so it is one attention of each, on the same states."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    settings = {
        "intermediate_size": 40,
        "attention_bias": False,
        "layer_norm_eps": 1e-6,
        "attn_implementation": "eager",
    }
    config = GPTNeoXConfig(**sizes, **settings, rope_parameters=rotation)
    config.rope_parameters["partial_rotary_factor"] = share  # older releases overwrite it with a default
    neox = filled(GPTNeoXModel(config))
    theirs = neox.layers[0].attention
    fused = theirs.query_key_value.weight.detach().view(4, 3, 8, 32)
    # States of mean zero and variance one, which either norm leaves as they are.
    words = torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    words = torch.nn.functional.layer_norm(words, (32,), eps=0)
    torch.nn.init.ones_(neox.layers[0].input_layernorm.weight)
    torch.nn.init.zeros_(neox.layers[0].input_layernorm.bias)

    def llama_attention(its_share: float) -> torch.Tensor:
        scheme = {"type": "rope", "theta": 10000.0, "partial_rotary_factor": its_share}
        changes = {"num_hidden_layers": 1, "num_key_value_heads": 4, "attn_implementation": "eager"}
        llama = filled(LlamaModel(tiny.config("llama", **changes, position_scheme=scheme)))
        torch.nn.init.ones_(llama.layers[0].input_layernorm.weight)
        with torch.no_grad():
            for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
                getattr(llama.layers[0].self_attn, name).weight.copy_(fused[:, index].reshape(32, 32))
        return attention_of(llama, llama.layers[0].self_attn, words)

    expected = attention_of(neox, theirs, words)
    # LLaMA's norm and eager softmax are in float32.
    torch.testing.assert_close(llama_attention(share), expected, rtol=0, atol=3e-6)
    assert (llama_attention(0.5 if share == 1.0 else 1.0) - expected).abs().max() > 1e-3
