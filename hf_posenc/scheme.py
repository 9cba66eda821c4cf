"""What a scheme is: at most four seams into a transformer, and what it is told about the model and its positions.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, E width of the model, L = Q + K - 1 distances,
R rows of a table.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from .fading import faded
from .options import Options as AnyOptions
from .terms import DistanceRows, Term


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
    active: tuple[dict[str, tuple[int, ...]], ...] = ()
    """For each layer and seam, the places of the schemes that act there."""

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
        keys_BK: torch.Tensor | None = None,
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
        self.keys_BK = keys_BK
        """The positions of all keys, where a scheme asks for them (`needs_key_positions`)."""
        self.table: nn.Module | None = None
        """The architecture's own position table, where it is left to a scheme to read it and put it in."""
        self.spans: tuple[tuple[int, int], ...] | None = None
        """For each row the slots from its first token to behind its last, where the mask is padding at the ends only
        and that could be read; None otherwise."""
        self.causal = False
        """Whether queries see no key ahead, where no mask says otherwise."""
        self.context_BQE: torch.Tensor | None = None
        """The mean of the words that a query may know of, where a scheme asks for it (`needs_context`)."""
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
        moved.prepared, moved.keys_BK = move(self.prepared), move(self.keys_BK)
        return moved


class Content:
    """What one layer's attention is about to multiply, for score terms that depend on it."""

    def __init__(
        self,
        query_BHQD: torch.Tensor,
        turned_BHQD: torch.Tensor,
        key_BGKD: torch.Tensor,
        scaling: float,
        visible: Callable[[], torch.Tensor],
        project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.query_BHQD = query_BHQD
        """Before any rotation, so that a term of the query and the distance stays one beside a rotation."""
        self.turned_BHQD = turned_BHQD
        """As it meets the keys."""
        self.scaling = scaling
        """What the architecture multiplies the product of query and key by."""
        self.visible = visible
        """Gives the keys that each query may see, True at them: (B or 1, 1, Q, K)."""
        self.project = project
        """Sends states, (R, E), through the layer's own query and key projections: two of (H, R, D)."""
        self.key_BGKD = key_BGKD
        """As the cache has them, after any rotation: one for each group of heads that share a key."""
        self._key_BHKD: torch.Tensor | None = None

    def of_heads(self, heads: slice) -> Content:
        """The same for some of the heads: whole groups that share a key, one or several."""
        shared = self.query_BHQD.shape[1] // self.key_BGKD.shape[1]
        groups = slice(heads.start // shared, heads.stop // shared)
        return Content(
            self.query_BHQD[:, heads],
            self.turned_BHQD[:, heads],
            self.key_BGKD[:, groups],
            self.scaling,
            self.visible,
            self.project,
        )

    @property
    def key_BHKD(self) -> torch.Tensor:
        """The keys once for each head."""
        if self._key_BHKD is None:
            groups = self.query_BHQD.shape[1] // self.key_BGKD.shape[1]
            self._key_BHKD = self.key_BGKD.repeat_interleave(groups, dim=1) if groups > 1 else self.key_BGKD
        return self._key_BHKD


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
Part = Callable[..., Any]
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
    rewrites_words: bool = False
    """Whether its `embed` does more than add, so that what comes before and after it is not the same."""
    Options: ClassVar[type[AnyOptions]] = AnyOptions
    strength: float = 1.0
    """How much of it acts: less than all while one encoding is handed over to another."""
    is_stock: ClassVar[str | None] = None
    """What of a stock architecture it is, without any options: its "table" or its "rotary"; None: neither."""
    fades_angles: ClassVar[bool] = False
    """Whether its `rotate` turns by as much of the angle as `strength` says. Otherwise what it gives is weakened."""

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
        found = getattr(self, seam)(*args)
        if self.strength == 1.0 or (seam == "rotate" and self.fades_angles):
            return found
        return faded(seam, found, args, self.strength)

    def takes_part(self) -> bool:
        """Whether anything of it acts. In training all do: parameters must get gradients there, if only zeros."""
        return self.strength > 0 or self.training

    def prepare(self, positions: Positions) -> Any:
        """Work shared by all layers: angles, buckets. Of parameters only where gradients are off: it is done outside of
        the layers, which checkpointing runs again."""
        return None

    def embed(self, words_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The input embeddings with the position signal in them."""
        return words_BQE

    def rotate(self, states_BHQD: torch.Tensor, prepared: Any, keys: bool) -> torch.Tensor:
        """Queries, or keys before they enter the cache, turned by their own positions."""
        return states_BHQD

    def score(self, prepared: Any, part: Part | None, content: Content) -> Term | list[Term]:
        """What is added to the scaled attention logits, in the cheapest of the forms of `terms` that says it.

        `part` calls this layer's `layer_part`, if there is one, so that hooks on it fire.
        """
        raise AssertionError("only called on schemes that override it")

    def content_scale(self, part: Part | None) -> torch.Tensor:
        """(H,): what the product of query and key is multiplied by, on top of the architecture's own scaling."""
        raise AssertionError("only called on schemes that override it")

    def value(self, prepared: Any, part: Part | None) -> DistanceRows:
        """The vector of each distance, which joins the value of every key at that distance."""
        raise AssertionError("only called on schemes that override it")

    def layer_part(self) -> nn.Module | None:
        """The parameters of one layer, kept in that layer's attention module; None if all layers share theirs."""
        return None

    def reset_parameters(self) -> None:
        """Initialise own parameters, through `transformers.initialization` so that loaded ones are left alone."""

    def turns_by_halves(self) -> bool:
        """Whether `prepare` gives first cosines and sines, (B, 1, Q, D), of turns of features half a head apart.

        LLaMA's own code turns that way: where nothing else asks for queries that are not turned, it is left to do it.
        """
        return False

    def keeps_table(self) -> bool:
        """Whether the architecture's own position table stays and is used by this scheme."""
        return False

    def moves_rows(self) -> bool:
        """Whether the architecture's own table gives other rows, under this scheme, also where it has rows enough."""
        return False

    def dress_table(self, table: nn.Embedding, held: bool, fades: bool) -> None:
        """Change how the architecture's own table looks up, by giving the object a subclass of its class.

        `held`: the architecture must get nothing from it, because the scheme puts it in itself (`Positions.table`).
        `fades`: its `strength` will be set.
        """

    def undress_table(self, table: nn.Embedding) -> None:
        """Undo `dress_table`."""


class LayerPart(nn.Module):
    """Base of what `Scheme.layer_part` returns: parameters with an initialisation of their own."""

    def reset_parameters(self) -> None:
        """Initialise own parameters, through `transformers.initialization` so that loaded ones are left alone."""


class LayerParameters(LayerPart):
    """A part that hands out its parameters by name, when it is called: hooks that bring them in must fire."""

    def forward(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters(recurse=False))
