"""Models and texts to analyze: a checkpoint, a random model that only carries a scheme, token ids from a file."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, GPT2Config, PreTrainedModel
from transformers.utils import logging

from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import ARCHITECTURES
from ..spec import PositionScheme
from .inspection import ModelInspector

TOKENS_PER_FEATURE = 16
"""Vocabulary of `build_model` relative to its hidden size: many more tokens than dimensions, as in real models."""
CHARACTERS_PER_TOKEN = 16
"""Upper bound used to decide how much of a text file to read."""


def build_model(
    scheme: PositionScheme,
    *,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_layers: int = 1,
    max_positions: int = 512,
    causal: bool = True,
) -> PreTrainedModel:
    """Build a small random model around a position scheme, to study the scheme without a checkpoint.

    Token embeddings are random and scaled to the mean norm of the position vectors.

    Args:
        scheme: The position scheme: a name, a dict or a list.
        hidden_size: Width of the model.
        num_heads: Attention heads; must divide `hidden_size`.
        num_layers: Number of layers.
        max_positions: Trained length, which is the size of learned tables.
        causal: Build a GPT-2; otherwise a bidirectional BERT.

    Returns:
        A base model in eval mode.

    Raises:
        PosEncError: If the sizes do not fit or the scheme is invalid.

    Example:
        >>> model = build_model("sinusoidal", hidden_size=512, num_heads=8)
    """
    if hidden_size < 1 or num_heads < 1 or hidden_size % num_heads:
        raise PosEncError(f"hidden_size must be a multiple of num_heads, got {hidden_size} and {num_heads}")
    sizes = {
        "vocab_size": TOKENS_PER_FEATURE * hidden_size,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": max_positions,
    }
    unused = {"n_inner": 1, "bos_token_id": None, "eos_token_id": None} if causal else {"intermediate_size": 1}
    config_class = GPT2Config if causal else BertConfig
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config_class(**sizes, **unused, position_scheme=scheme)).eval()
    with torch.no_grad():
        tokens = model.get_input_embeddings().weight
        for positions in ModelInspector(model, min(max_positions, 128)).position_vectors()[:1]:
            if positions.any():
                tokens.mul_((positions.norm(dim=-1).mean() / tokens.norm(dim=-1).mean()).item())
    return model


def load_model(source: str | Path, scheme: PositionScheme | None = None) -> PreTrainedModel:
    """Load the base model of a checkpoint, optionally with another position scheme.

    Args:
        source: Directory or Hub id of a stock checkpoint or a converted one.
        scheme: The position scheme to load it with; by default the checkpoint keeps its own encoding.

    Returns:
        A base model in eval mode.

    Raises:
        PosEncError: If the checkpoint cannot be read, is incomplete, or is of an unsupported architecture.

    Example:
        >>> model = load_model("openai-community/gpt2", "alibi")
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise PosEncError(f"Cannot read a checkpoint at {source}: {error}") from error
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None and not isinstance(config, VariantConfig):
        raise PosEncError(
            f"{source} is a {config.model_type} model; expected one of {sorted(ARCHITECTURES)} or a converted model"
        )
    if scheme is None and architecture is not None:
        scheme = architecture.stock_scheme
    options = {} if scheme is None else {"position_scheme": scheme}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # unused head weights are expected; missing weights are reported below
    try:
        model, info = AutoModel.from_pretrained(source, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise PosEncError(f"{source} is incomplete: {len(missing)} weights are missing, among them {missing[0]}")
    return model.eval()


def tokenize_file(tokenizer: str | Path, path: str | Path, length: int, rows: int) -> torch.Tensor:
    """Cut the beginning of a text file into rows of token ids.

    Args:
        tokenizer: Directory or Hub id of a checkpoint with a tokenizer.
        path: A UTF-8 text file.
        length: Tokens per row; a shorter text gives a single shorter row.
        rows: Maximum number of rows.

    Returns:
        Token ids of shape (rows, tokens).

    Raises:
        PosEncError: If the tokenizer or the file cannot be read, or the text has fewer than two tokens.
    """
    try:
        encode = AutoTokenizer.from_pretrained(tokenizer)
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(CHARACTERS_PER_TOKEN * length * rows)
    except (OSError, ValueError) as error:
        raise PosEncError(f"Cannot tokenize {path}: {error}") from error
    input_ids = torch.tensor(encode(text, verbose=False, add_special_tokens=False)["input_ids"], dtype=torch.long)
    length = min(length, len(input_ids))
    if length < 2:
        raise PosEncError(f"{path} has fewer than two tokens")
    return input_ids[: len(input_ids) // length * length].view(-1, length)[:rows]
