"""Models of one size (4 layers, width 768, 12 heads): stock, with a scheme, and stock models with the same encoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import hf_posenc  # noqa: F401

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 768, 12, 1000
DEBERTA_V2 = {"type": "deberta", "buckets": 256}
DEBERTA_V1 = {"type": "deberta", "share_projections": False, "norm": None}
Model = Any


def _with(scheme: Any, backend: str) -> dict[str, Any]:
    return {"attn_implementation": backend, **({} if scheme is None else {"position_scheme": scheme})}


def bert(length: int, scheme: Any = None, backend: str = "sdpa", layers: int = LAYERS) -> Model:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_with(scheme, backend),
    )
    return BertModel(config, add_pooling_layer=False)


def gpt2(length: int, scheme: Any = None, backend: str = "sdpa", head: bool = False) -> Model:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=length,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        **_with(scheme, backend),
    )
    return (GPT2LMHeadModel if head else GPT2Model)(config)


def llama(length: int, scheme: Any = None, backend: str = "sdpa", head: bool = False) -> Model:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2048,
        max_position_embeddings=length,
        **_with(scheme, backend),
    )
    return (LlamaForCausalLM if head else LlamaModel)(config)


def deberta_v2(length: int, layers: int = LAYERS) -> Model:
    return transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            **_deberta_sizes(layers),
            position_buckets=256,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            type_vocab_size=0,
        )
    )


def deberta_v1(length: int, layers: int = LAYERS) -> Model:
    return transformers.DebertaModel(transformers.DebertaConfig(**_deberta_sizes(layers)))


def _deberta_sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": 512,
        "relative_attention": True,
        "pos_att_type": "c2p|p2c",
        "position_biased_input": False,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def roformer(length: int) -> Model:
    return transformers.RoFormerModel(
        transformers.RoFormerConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def xlnet(length: int) -> Model:
    return transformers.XLNetModel(
        transformers.XLNetConfig(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            d_inner=4 * WIDTH,
            dropout=0.0,
            summary_last_dropout=0.0,
        )
    )


def t5_encoder(length: int) -> Model:
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            num_layers=LAYERS,
            num_heads=HEADS,
            d_ff=4 * WIDTH,
            dropout_rate=0.0,
        )
    )


def bloom(length: int) -> Model:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS)
    return transformers.BloomModel(config)


def mpt(length: int) -> Model:
    config = transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_seq_len=max(length, 2048)
    )
    return transformers.MptModel(config)


def neox(length: int) -> Model:
    return transformers.GPTNeoXModel(
        transformers.GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=length,
            attn_implementation="sdpa",
        )
    )


def x_transformers(causal: bool, **attention: Any) -> Callable[[int], Model]:
    """A model of x-transformers, with flash attention where it supports that."""

    def build(length: int) -> Model:
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = (Decoder if causal else Encoder)(dim=WIDTH, depth=LAYERS, heads=HEADS, **attention)
        wrapper = TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=length, use_abs_pos_emb=False, attn_layers=layers
        )

        class BaseModel(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.wrapper = wrapper

            def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
                return (self.wrapper(ids, return_embeddings=True),)

        return BaseModel()

    return build


Builder = Callable[..., Model]


def _family(name: str, build: Builder, schemes: dict[str, Any], eager: tuple[str, ...] = ()) -> dict[str, Builder]:
    """The stock model, a variant per scheme, and some variants on the eager backend."""
    builders = {name: build}
    builders |= {f"{name} + {title}": partial(build, scheme=scheme) for title, scheme in schemes.items()}
    for title in eager:
        builders[f"{name} + {title}, eager"] = partial(build, scheme=schemes[title], backend="eager")
    return builders


def _x_transformers(causal: bool) -> dict[str, Builder]:
    return {
        "x-transformers rotary": x_transformers(causal, rotary_pos_emb=True, attn_flash=True),
        "x-transformers alibi": x_transformers(causal, alibi_pos_bias=True, alibi_num_heads=HEADS, attn_flash=True),
        "x-transformers t5": x_transformers(causal, rel_pos_bias=True),
    }


COMMON = {name: name for name in ("rope", "alibi", "t5")}
CONTENT_BASED = {name: name for name in ("tupe", "shaw", "transformer_xl")}
DEBERTAS = {"deberta (v2)": DEBERTA_V2, "deberta (v1)": DEBERTA_V1}
ENCODERS: dict[str, Builder] = {
    **_family("BERT", bert, {**COMMON, **CONTENT_BASED, **DEBERTAS}, eager=("t5", "deberta (v2)")),
    "RoFormer": roformer,
    "T5 encoder": t5_encoder,
    "XLNet": xlnet,
    "DebertaV2": deberta_v2,
    "Deberta": deberta_v1,
    **_x_transformers(False),
}
DECODERS: dict[str, Builder] = {
    **_family("GPT-2", gpt2, COMMON, eager=("alibi",)),
    "BLOOM (alibi)": bloom,
    "MPT (alibi)": mpt,
    "GPT-NeoX (rope)": neox,
    **_x_transformers(True),
}
LLAMAS = _family("LLaMA", llama, COMMON)
FORGET = "LLaMA + rope + forget"
FORGETTING = _family("LLaMA", llama, {"rope + forget": ["rope", "forget"]})
QUADRATIC = (
    "eager",
    "RoFormer",
    "T5 encoder",
    "XLNet",
    "Deberta",
    "BLOOM",
    "MPT",
    "x-transformers t5",
    "x-transformers alibi",
)
"""Models that materialize all attention weights, which is too slow at the greatest length."""


def forward(model: Model, ids: torch.Tensor) -> Callable[[], None]:
    model.eval()
    extra = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}

    def run() -> None:
        with torch.no_grad():
            model(ids, **extra)

    return run


def training_step(model: Model, ids: torch.Tensor) -> Callable[[], None]:
    model.train()
    extra = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}

    def run() -> None:
        model(ids, **extra)[0].sum().backward()
        model.zero_grad()

    return run
