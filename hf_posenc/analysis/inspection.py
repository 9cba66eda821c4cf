"""Models to analyze and access to the schemes inside. Only this module depends on how variants store and call them.

Shape legend: B batch, H heads, N tokens, D head size, E hidden size, P size of a position vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, BertConfig, GPT2Config, PreTrainedModel

from .. import checkpoints
from ..attention import ActiveScheme, LayerSchemes, far_rotation, materialize, score_terms
from ..errors import PosEncError
from ..patches import PosEncModel, architecture_of, base_models, check_undivided, restore, retrofit
from ..patches.compat import attn_implementation
from ..schemes import Content, DistanceBias, InputScheme, KeyTerm, ModelShape, Positions, QueryTerm, Scheme
from ..spec import PositionScheme

TOKENS_PER_FEATURE = 16
"""Vocabulary of `build_model` relative to its hidden size: many more tokens than dimensions, as in real models."""
CHARACTERS_PER_TOKEN = 16
"""Upper bound used to decide how much of a text file to read."""


@contextmanager
def inspect_model(model: nn.Module, length: int) -> Iterator[ModelInspector]:
    """Inspect a model in eval mode and without gradients, at `length` positions.

    A stock model carries its own encoding as a scheme inside the block and is restored afterwards.
    """
    architecture, is_stock = architecture_of(model), not isinstance(model, PosEncModel)
    training_modes = [(module, module.training) for module in model.modules()]
    if is_stock:
        retrofit(model, architecture.stock_scheme)
    try:
        model.eval()
        with torch.no_grad():
            yield ModelInspector(base_models(model)[0], length)
    finally:
        if is_stock:
            restore(model)
        for module, training in training_modes:
            module.training = training


class ModelInspector:
    """A base model, and the positions of one unpadded sequence with what its schemes precompute for them."""

    def __init__(self, base: PreTrainedModel, length: int) -> None:
        if length < 2:
            raise PosEncError(f"length must be at least 2, got {length}")
        check_undivided(base, "The analysis of a model")
        self.base = base
        self.schemes: list[Scheme] = list(base.position_scheme)
        self.name = " + ".join(scheme.name for scheme in self.schemes)
        mixes = [scheme.options.mix for scheme in self.schemes if isinstance(scheme, InputScheme)]
        self.mix = mixes[0] if mixes else "none"
        self.shape: ModelShape = self.schemes[0].shape
        self.attentions = base.architecture.self_attentions(base)
        self.token_vectors: torch.Tensor = base.get_input_embeddings().weight
        input_ids = torch.zeros(1, length, dtype=torch.long, device=base.device)
        self.positions: Positions = base.prepare_inputs({"input_ids": input_ids}).positions

    def run(self, input_ids: torch.Tensor, on_attention: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        """Run rows of tokens one by one, calling `on_attention(layer, hidden_states_NE, weights_HNN)` in each layer."""
        if input_ids.dim() != 2:
            raise PosEncError(f"input_ids must have shape (rows, tokens), got {tuple(input_ids.shape)}")
        vocab_size, largest = len(self.token_vectors), int(input_ids.max())
        if largest >= vocab_size or int(input_ids.min()) < 0:
            raise PosEncError(
                f"token {largest} is outside the model's vocabulary of {vocab_size} tokens; models are compared on "
                "the same tokens, so they must share a tokenizer"
            )

        def hook(layer: int, module: nn.Module, args: tuple, kwargs: dict, output: tuple[torch.Tensor, ...]) -> None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            on_attention(layer, hidden_states[0], output[1][0])

        with ExitStack() as cleanup:
            cleanup.callback(self.base.set_attn_implementation, attn_implementation(self.base.config))
            self.base.set_attn_implementation("eager")  # the only one that returns attention weights
            for layer, attention in enumerate(self.attentions):
                cleanup.callback(attention.register_forward_hook(partial(hook, layer), with_kwargs=True).remove)
            for row in input_ids.to(self.base.device):
                self.base(input_ids=row[None], use_cache=False)

    def position_vectors(self) -> list[torch.Tensor]:
        """(N, P) for each scheme at the input embedding."""
        tables = []
        for scheme in self.schemes:
            if isinstance(scheme, InputScheme):
                vectors_BNP = self._stock_table(scheme, self.positions)
                vectors_BNP = scheme.position_embeddings(self.positions) if vectors_BNP is None else vectors_BNP
                tables.append(vectors_BNP[0].float().expand(self.positions.key_length, -1).clone().cpu())
            elif scheme.acts_at("embed"):
                raise PosEncError(f"{scheme.name} changes token embeddings without a vector for each position")
        return tables

    def input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, N, E): token embeddings with positions mixed in, before the model's first layer norm."""
        inputs = {"input_ids": input_ids.to(self.base.device)}
        positions = self.base.prepare_inputs(inputs).positions
        embeddings = inputs.get("inputs_embeds")
        embeddings = self.token_vectors[inputs["input_ids"]] if embeddings is None else embeddings
        for scheme in self.schemes:
            vectors_BNE = self._stock_table(scheme, positions)
            embeddings = embeddings if vectors_BNE is None else embeddings + vectors_BNE
        return embeddings.float().cpu()

    def unmixed_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, N, E + P): token and position vectors side by side."""
        positions = [table.expand(len(input_ids), -1, -1) for table in self.position_vectors()]
        return torch.cat([self.token_vectors.float().cpu()[input_ids], *positions], dim=-1)

    def _stock_table(self, scheme: Scheme, positions: Positions) -> torch.Tensor | None:
        """Rows of the architecture's own table, if the scheme leaves it to the stock forward to add them."""
        if not scheme.uses_stock_table() or positions.table is not None:
            return None
        return self.base.get_submodule(self.base.architecture.table)(positions.queries_BQ)

    def layer_schemes(self, layer: int) -> LayerSchemes:
        """The schemes that act in a layer, by seam."""
        if not 0 <= layer < len(self.attentions):
            raise PosEncError(f"layer {layer} does not exist; the model has layers 0 to {len(self.attentions) - 1}")
        return self.attentions[layer].layer_schemes(self.positions)

    def rotations(self, layer: int) -> list[ActiveScheme]:
        """The rotations of a layer, including those that stock code applies with a scheme's angles."""
        active = self.layer_schemes(layer)
        if far_rotation(active.remap) is not None:
            raise PosEncError(
                f"{self.name} rotates far keys apart from near ones (extend), so that a layer has more than one "
                "rotation at this length: look at fewer positions, or leave extend out"
            )
        return [*active.rotate, *active.stock_rotation]

    def content_free_bias(self, layer: int) -> tuple[Callable[[int], torch.Tensor], bool] | None:
        """The bias of a layer that does not depend on queries and keys, or None if it has none.

        Returns a function from a query position to its (H, N) bias, and whether only the distance matters.
        """
        active = self.layer_schemes(layer).score
        attention, positions, length = self.attentions[layer], self.positions, self.positions.key_length
        zeros = self.token_vectors.new_zeros(1, self.shape.num_heads, length, self.shape.head_size)
        visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=zeros.device)
        visible = visible.tril() if positions.causal else visible
        scaling = attention.project(zeros.new_zeros(1, 1, self.shape.hidden_size)).scaling
        content = Content(zeros, zeros, zeros, scaling, lambda: visible, attention.project_rows)
        # CoPE counts tokens by content, so it has no content-free term.
        terms = score_terms([entry for entry in active if entry.scheme.needs_distances], content)
        terms = [term for term in terms if not isinstance(term, (QueryTerm, KeyTerm))]
        if not terms:
            return None
        others = [term for term in terms if not isinstance(term, DistanceBias)]
        others_are_zero = all(isinstance(term, torch.Tensor) and not term.any() for term in others)

        def at_query(query: int) -> torch.Tensor:
            dense = [materialize(term, positions, content)[0].expand(-1, length, -1)[:, query] for term in terms]
            return torch.stack(dense).sum(0).cpu()

        return at_query, others_are_zero and len(others) < len(terms)


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
    config = checkpoints.read_config(source)
    if not hasattr(config, "position_scheme"):
        raise PosEncError(f"{source} is a {config.model_type} model, which hf_posenc does not support")
    options: dict[str, Any] = {} if scheme is None else {"position_scheme": scheme}
    model, missing = checkpoints.load_model(source, **options)
    if missing:
        raise PosEncError(f"{source} is incomplete: {len(missing)} weights are missing, among them {missing[0]}")
    return model


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
    encode = checkpoints.load_tokenizer(tokenizer)
    if encode is None:
        raise PosEncError(f"{tokenizer} has no tokenizer files; use a checkpoint that has them")
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(CHARACTERS_PER_TOKEN * length * rows)
    except (OSError, ValueError) as error:
        raise PosEncError(f"Cannot tokenize {path}: {error}") from error
    input_ids = torch.tensor(encode(text, verbose=False, add_special_tokens=False)["input_ids"], dtype=torch.long)
    length = min(length, len(input_ids))
    if length < 2:
        raise PosEncError(f"{path} has fewer than two tokens")
    return input_ids[: len(input_ids) // length * length].view(-1, length)[:rows]
