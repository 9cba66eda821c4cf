"""Where a model to look at comes from: a checkpoint, or a scheme alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, BertConfig, GPT2Config
from transformers.utils import logging

from ..config import VariantConfig
from ..patches.live_models import ARCHITECTURES
from .subjects import own_scheme
from .vectors import position_vectors

WORDS_A_FEATURE = 16
"""Words of a model without a checkpoint, for each feature: many more than there are directions, as in real ones."""


def scheme_model(
    scheme: Any,
    *,
    width: int = 64,
    heads: int = 4,
    layers: int = 1,
    max_positions: int = 512,
    causal: bool = True,
    seed: int = 0,
) -> Any:
    """A model around a scheme that no checkpoint is needed for: GPT-2's form, or BERT's where it is not causal.

    The scheme's parameters are as the scheme starts. Words are random, and as long as the vectors of positions are.
    """
    if width < 1 or heads < 1 or width % heads:
        raise ValueError(f"the width must be a multiple of the number of heads, got {width} and {heads}")
    common = {"vocab_size": WORDS_A_FEATURE * width, "position_scheme": scheme}
    if causal:
        sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": max_positions, "n_inner": 1}
        config: Any = GPT2Config(**common, **sizes, bos_token_id=None, eos_token_id=None)
    else:
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
        config = BertConfig(**common, **sizes, max_position_embeddings=max_positions, intermediate_size=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        words, positions = model.get_input_embeddings().weight, position_vectors(model, min(max_positions, 128))
        if positions.any():
            words.mul_((positions.norm(dim=-1).mean() / words.norm(dim=-1).mean()).item())
    return model


def checkpoint_model(source: str | Path, scheme: Any = None) -> Any:
    """The base model of a checkpoint, under a scheme; without one, under the encoding that the checkpoint has."""
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no checkpoint that can be read at {source}: {error}") from error
    own = ARCHITECTURES.get(config.model_type)
    if scheme is None and own is not None:
        scheme = own_scheme(own)
    elif own is None and not isinstance(config, VariantConfig):
        raise ValueError(
            f"{source} is a {config.model_type} model; hf_posenc takes {sorted(ARCHITECTURES)} and their variants"
        )
    named = {} if scheme is None else {"position_scheme": scheme}
    loud = logging.get_verbosity()
    logging.set_verbosity_error()  # that a head is left out is no news; what is missing is said below
    try:
        model, loading = AutoModel.from_pretrained(source, output_loading_info=True, **named)
    finally:
        logging.set_verbosity(loud)
    missing = sorted(key for key in loading["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ValueError(f"{source} lacks weights of the model, among them {missing[0]}")
    return model.eval()
