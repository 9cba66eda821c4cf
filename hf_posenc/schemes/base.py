"""What a scheme is: at most four seams into a transformer, and what it is told about the model and its positions.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, E width of the model, L = Q + K - 1 distances,
R rows of a table.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .inputs import Content, Positions
from .options import Options as AnyOptions
from .terms import DistanceTable, Term


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The facts of a model that schemes are built from, the same words for every architecture."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    max_positions: int
    """The length the checkpoint was trained for."""
    causal: bool
    table_size: int | None
    """Rows of the architecture's own position table; None where it has none."""
    rope_parameters: dict[str, Any] | None
    """The checkpoint's own rotation; None where it has none."""


class Kind(enum.Enum):
    """Where a scheme acts, and what on: the sections of the reference page."""

    INPUT = "At the input embedding"
    ROTATION = "Rotation of queries and keys"
    DISTANCE = "Bias on the scores by distance"
    CONTENT = "Score terms that depend on the content"
    NOTHING = "Nothing"
    OTHER = "Others"


LAYER_SEAMS = ("rotate", "score", "content_scale", "value")
"""Where a scheme acts inside of a layer."""
STOCK_ROTATION = "stock rotation"
"""Beside the seams: where a scheme's angles are handed to the architecture, which turns by them itself."""
LayerParams = Callable[..., Any]
"""How a scheme is handed its part of a layer: to be called. A module would be taken along to other devices by hooks."""


class Scheme(nn.Module):
    """Base of all schemes. A scheme overrides the seams it acts at: `embed`, `rotate`, `score`, `value`.

    Seams are reached through `__call__` (`scheme("rotate", ...)`), so that hooks on the module fire: offload, FSDP,
    ZeRO. `prepare` does once a forward what depends on positions alone; its result comes back to every seam.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    kind: ClassVar[Kind] = Kind.OTHER
    formula: ClassVar[str] = ""
    """What it computes, for query i, key j and r = j - i."""
    cost: ClassVar[str] = ""
    """Its parameters, and what it computes beyond plain attention."""
    neutral: ClassVar[str] = ""
    """The parameters that let it start as no change at all, beside the old encoding."""
    extends: ClassVar[bool]
    """Whether a trained model can be run past its trained length at all (not: how well)."""
    depends_on_length: bool = False
    """Whether what it computes changes with the length of the input, so that a cache must know its own."""
    at_input: ClassVar[bool] = False
    """Acts at the input embedding, so that `layers` means nothing to it."""
    needs_distances: ClassVar[bool] = True
    """Whether its score depends on where keys stand, so that a cache must be able to tell."""
    needs_key_positions: ClassVar[bool] = False
    """Whether it reads `Positions.keys_BK`."""
    needs_context: bool = False
    """Whether it reads `Positions.context_BQE`."""
    rewrites_embeddings: bool = False
    """Whether its `embed` does more than add, so that what comes before and after it is not the same."""
    Options: ClassVar[type[AnyOptions]] = AnyOptions

    def __init__(self, options: AnyOptions, shape: ModelShape) -> None:
        super().__init__()
        self.options = options
        self.shape = shape

    @classmethod
    def acts(cls, seam: str, options: Any) -> bool:
        """Whether it acts at a seam under the options: where it overrides it, unless a subclass knows better."""
        return getattr(cls, seam) is not getattr(Scheme, seam)

    def acts_at(self, seam: str) -> bool:
        return self.acts(seam, self.options)

    def forward(self, seam: str, *args: Any) -> Any:
        return getattr(self, seam)(*args)

    def prepare(self, positions: Positions) -> Any:
        """Work shared by all layers: angles, buckets. Of parameters only where gradients are off: it is done outside of
        the layers, which checkpointing runs again."""
        return None

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The input embeddings with the position signal in them."""
        return inputs_embeds_BQE

    def rotate(self, states_BHQD: torch.Tensor, prepared: Any, keys: bool) -> torch.Tensor:
        """Queries, or keys before they enter the cache, turned by their own positions."""
        return states_BHQD

    def score(self, prepared: Any, part: LayerParams | None, content: Content) -> Term | list[Term]:
        """What is added to the scaled attention logits, in the cheapest of the forms of `terms` that says it.

        `part` calls this layer's `layer_module`, if there is one, so that hooks on it fire.
        """
        raise AssertionError("only called on schemes that override it")

    def content_scale(self, part: LayerParams | None) -> torch.Tensor:
        """(H,): what the product of query and key is multiplied by, on top of the architecture's own scaling."""
        raise AssertionError("only called on schemes that override it")

    def value(self, prepared: Any, part: LayerParams | None) -> DistanceTable:
        """The vector of each distance, which joins the value of every key at that distance."""
        raise AssertionError("only called on schemes that override it")

    def layer_module(self) -> nn.Module | None:
        """The parameters of one layer, kept in that layer's attention module; None if all layers share theirs."""
        return None

    def reset_parameters(self) -> None:
        """Initialise own parameters, through `transformers.initialization` so that loaded ones are left alone."""

    def uses_rotate_half(self) -> bool:
        """Whether `prepare` gives first cosines and sines, (B, 1, Q, D), of turns of features half a head apart.

        LLaMA's own code turns that way: where nothing else asks for queries that are not turned, it is left to do it.
        """
        return False

    def uses_stock_table(self) -> bool:
        """Whether the architecture's own position table stays and is used by this scheme."""
        return False

    def patch_embedding(self, table: nn.Embedding, scheme_owned: bool) -> nn.Embedding:
        """Return the module that replaces the architecture's position table, or the table itself to keep it.

        Called only if `uses_stock_table()`. The replacement must hold the same `weight` parameter.

        Args:
            table: The architecture's table.
            scheme_owned: Whether the architecture must get zeros from it, because `embed` reads the table itself
                (`Positions.table`).
        """
        return table


class LayerModule(nn.Module):
    """Base of what `Scheme.layer_module` returns: parameters with an initialisation of their own."""

    def reset_parameters(self) -> None:
        """Initialise own parameters, through `transformers.initialization` so that loaded ones are left alone."""


class LayerParameters(LayerModule):
    """A part that hands out its parameters by name, when it is called: hooks that bring them in must fire."""

    def forward(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters(recurse=False))
