"""What a scheme is: at most three seams into a transformer, and what it is told about the model and its positions.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from .options import Options as AnyOptions


def tracing() -> bool:
    """Whether this forward is being recorded, so that no tensor can be read and nothing decided by its values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


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


class Positions:
    """Where the tokens of one forward stand. Built once a forward, handed to every layer.

    `distances` is key position minus query position. When every query sees its keys at the same distances by slot
    (`uniform`), it is one vector, L long: key slot j from query slot i is at `distances[j - i + Q - 1]`. Otherwise
    (gaps, packed rows) it is of shape (B, Q, K).

    A plain class, not a dataclass: FSDP's mixed precision looks into dataclasses and would narrow what is in here.
    """

    schemes: Sequence[Scheme] = ()
    active: tuple[tuple[int, ...], ...] = ()
    """For each layer, the places of the schemes that act in it."""

    def __init__(
        self,
        queries_BQ: torch.Tensor,
        distances: torch.Tensor,
        *,
        uniform: bool,
        key_length: int,
        length_bound: int | None,
        cached: bool,
        cache_filled_at: int | None,
        packed: bool,
        dtype: torch.dtype,
    ) -> None:
        self.queries_BQ = queries_BQ
        self.distances = distances
        self.uniform = uniform
        self.key_length = key_length
        self.length_bound = length_bound
        """No position is above this less one; None where explicit position_ids leave it open."""
        self.cached = cached
        """Whether keys of earlier calls take part."""
        self.cache_filled_at = cache_filled_at
        """The length at which the first of those calls was made, where a scheme asks for it."""
        self.packed = packed
        """Whether rows hold, or may hold, several documents."""
        self.dtype = dtype
        """What biases are computed in: float32, or float64 in a float64 model. Never narrower."""
        self.prepared: list[Any] = []
        """What each scheme's `prepare` returned, by its place in `position_scheme`."""

    def length(self) -> int | None:
        """One more than the highest position. While traced, when no tensor can be read: the bound."""
        if tracing():
            return self.length_bound
        return int(self.queries_BQ.max()) + 1

    def distances_BQK(self) -> torch.Tensor:
        """All distances, written out where they are uniform: (1, Q, K) then."""
        if not self.uniform:
            return self.distances
        num_queries = self.queries_BQ.shape[-1]
        device = self.distances.device
        keys, queries = torch.arange(self.key_length, device=device), torch.arange(num_queries, device=device)
        return self.distances[keys - queries[:, None] + num_queries - 1][None]

    def to(self, device: Any, non_blocking: bool = False) -> Positions:
        """The same on another device: what hooks of models that span several devices call."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(move, value))
            return type(value)(map(move, value)) if isinstance(value, (tuple, list)) else value

        moved = copy.copy(self)
        moved.queries_BQ, moved.distances = move(self.queries_BQ), move(self.distances)
        moved.prepared = move(self.prepared)
        return moved


@dataclasses.dataclass(frozen=True)
class DistanceBias:
    """A score term that depends on head and distance only: one value a head for each of `Positions.distances`."""

    values: torch.Tensor
    """(H, L) where positions are uniform, else (H, B, Q, K)."""


class Scheme(nn.Module):
    """Base of all schemes. A scheme overrides the seams it acts at: `embed`, `rotate`, `score`.

    Seams are reached through `__call__` (`scheme("rotate", ...)`), so that hooks on the module fire: offload, FSDP,
    ZeRO. `prepare` does once a forward what depends on positions alone; its result comes back to every seam.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    extends: ClassVar[bool]
    """Whether a trained model can be run past its trained length at all (not: how well)."""
    depends_on_length: bool = False
    """Whether what it computes changes with the length of the input, so that a cache must know its own."""
    at_input: ClassVar[bool] = False
    """Acts at the input embedding, so that `layers` means nothing to it."""
    Options: ClassVar[type[AnyOptions]] = AnyOptions

    def __init__(self, options: AnyOptions, shape: ModelShape) -> None:
        super().__init__()
        self.options = options
        self.shape = shape

    @classmethod
    def overrides(cls, seam: str) -> bool:
        return getattr(cls, seam) is not getattr(Scheme, seam)

    def forward(self, seam: str, *args: Any) -> Any:
        return getattr(self, seam)(*args)

    def prepare(self, positions: Positions) -> Any:
        """Position-only work shared by all layers: angles, buckets. Holds no parameter, so it needs no gradient."""
        return None

    def embed(self, words_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The input embeddings with the position signal in them."""
        return words_BQE

    def rotate(self, states_BHQD: torch.Tensor, prepared: Any, keys: bool) -> torch.Tensor:
        """Queries, or keys before they enter the cache, turned by their own positions."""
        return states_BHQD

    def score(self, prepared: Any, part: nn.Module | None) -> DistanceBias | torch.Tensor:
        """The term added to the scaled attention logits: by distance where it depends on nothing else, which is cheap,
        or whole, (B or 1, H, Q, K). `part` is this layer's `layer_part`, if there is one."""
        raise AssertionError("only called on schemes that override it")

    def layer_part(self) -> nn.Module | None:
        """The parameters of one layer, kept in that layer's attention module; None if all layers share theirs."""
        return None

    def reset_parameters(self) -> None:
        """Initialise own parameters, through `transformers.initialization` so that loaded ones are left alone."""

    def keeps_table(self) -> bool:
        """Whether the architecture's own position table stays and is used by this scheme."""
        return False

    def dress_table(self, table: nn.Embedding) -> None:
        """Change how the architecture's own table looks up, by giving the object a subclass of its class."""

    def undress_table(self, table: nn.Embedding) -> None:
        """Undo `dress_table`."""


class LayerPart(nn.Module):
    """Base of what `Scheme.layer_part` returns: parameters with an initialisation of their own."""

    def reset_parameters(self) -> None:
        """Initialise own parameters, through `transformers.initialization` so that loaded ones are left alone."""
