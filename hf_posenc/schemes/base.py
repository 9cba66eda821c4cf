"""The base class of all schemes: the seams at which a scheme acts, and what it may know about the model.

Shape legend: B batch, H heads, Q queries, K keys, D head size, E hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, cast

import torch
from torch import nn
from typing_extensions import TypeVar

from .inputs import Content, Positions
from .options import Options as SchemeOptions
from .terms import DistanceTable, Remap, Term

LAYER_SEAMS = ("rotate", "score", "content_scale", "value", "remap")
"""The seams inside an attention layer; `embed` is the one outside."""
STOCK_ROTATION = "stock rotation"
"""Listed with the seams of a layer if the architecture's own code applies the scheme's rotation."""
LayerParams = Callable[[], dict[str, torch.Tensor]]
"""Returns a layer's parameters by name. A function, because hooks would move tensors or modules to other devices."""
Initializer = Callable[[torch.Tensor], object]
"""Fills a parameter in place, such as `transformers.initialization.zeros_`, which leaves loaded weights alone."""
StockRotate = Callable[..., torch.Tensor]
"""`rotate(states)`, or `rotate(states, offsets=(name, offsets_BN))`: see `Scheme.with_stock_rotation`."""
ParameterSpec = tuple[tuple[int, ...], Initializer]
"""The shape and the initializer of a parameter."""

ParameterTransform = Callable[[torch.Tensor], torch.Tensor]

OptionsT = TypeVar("OptionsT", bound=SchemeOptions, default=SchemeOptions)
PreparedT = TypeVar("PreparedT", default=Any)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The model a scheme is built for, in the same terms for every architecture."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    max_positions: int
    """The length the checkpoint was trained for."""
    causal: bool
    table_size: int | None
    """Positions in the architecture's own position table; None if it has none."""
    rope_parameters: dict[str, Any] | None
    """The checkpoint's own rotary settings; None if it has none."""
    layer_types: tuple[str, ...] | None = None
    """The type of each layer, such as "sliding_attention"; None if they have none."""
    embedding_size: int | None = None
    """The width of token embeddings; None: the hidden size."""
    table_first_row: int = 0
    """The row of the architecture's table that holds position 0."""
    rotary_layout: str = "halves"
    """Which features the checkpoint's own rotation pairs."""
    rotary_direction: int = 1
    """-1 if the checkpoint's own rotation turns the other way than LLaMA's."""


class Kind(enum.Enum):
    """Where a scheme acts and on what. The values are the section titles of the reference page."""

    INPUT = "Input embedding"
    ROTATION = "Rotation of queries and keys"
    DISTANCE = "Attention bias by distance"
    CONTENT = "Attention terms that depend on the content"
    TEMPERATURE = "Attention temperature"
    NOTHING = "No positions"
    OTHER = "Other"


@contextlib.contextmanager
def transformed_parameters(module: nn.Module, transform: ParameterTransform) -> Iterator[None]:
    """While the block runs, replace the parameters of a module and its children by what a function returns for them."""
    owners = list(module.modules())
    originals = [dict(owner._parameters) for owner in owners]
    try:
        for owner, parameters in zip(owners, originals, strict=True):
            for name, parameter in parameters.items():
                if parameter is not None:
                    owner._parameters[name] = transform(parameter)  # type: ignore[assignment]
        yield
    finally:
        for owner, parameters in zip(owners, originals, strict=True):
            owner._parameters.update(parameters)


class ParameterModule(nn.Module):
    """A module that knows how each of its parameters is initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.initializers: dict[str, Initializer] = {}

    def add_parameters(self, **parameters: ParameterSpec) -> None:
        """Create parameters.

        Args:
            **parameters: The shape and the initializer of each parameter, from `transformers.initialization`.
        """
        for name, (shape, initializer) in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            self.initializers[name] = initializer

    def reset_parameters(self) -> None:
        """Initialize the parameters that were not loaded from a checkpoint."""
        for name, initializer in self.initializers.items():
            initializer(self.get_parameter(name))


class Scheme(ParameterModule, Generic[OptionsT, PreparedT]):
    """Base class of all position schemes.

    A subclass overrides the seams it acts at: `embed`, `rotate`, `score` and `value` (and `content_scale` and `remap`,
    and `gate` if `score` depends on hidden states). What it does not override stays as in the stock model. `prepare`
    runs once per forward pass and does the work that depends on positions alone; its result is passed to the other
    seams. The engine calls the seams through `scheme("score", ...)`, so that forward hooks (offloading, FSDP, ZeRO)
    fire. `add_parameters` in `__init__` creates parameters that all layers share, and `layer_module` those of one
    layer.

    Args:
        options: The scheme's options, an instance of `Options`.
        shape: The model it is built for.

    Attributes:
        name: Its `type` in `position_scheme`.
        paper: Authors, year and link.
        kind: The section of the reference page it belongs to.
        formula: What it computes, for query i, key j and r = j - i.
        cost: Its parameters, and what it computes beyond plain attention.
        neutral: Which parameters start at zero, so that adding the scheme to the model's own encoding changes nothing.
        tested_against: What the tests compare it with.
        recommended: Options with which it recovers most of a checkpoint's quality when it replaces another encoding.
        extends: Whether a trained model runs past its trained length at all (not how well).
        inherits_rotation: Whether options that are not set come from the checkpoint's own rotary settings.
        at_input: Whether it acts at the input embedding only, so that the `layers` option does not apply.
        reads_positions: Whether the result depends on `position_ids` at all.
        depends_on_length: Whether the result depends on the input's length, which a cache must then record.
        needs_distances: Whether scores depend on key positions, which a cache must then record.
        needs_key_positions: Whether it reads `Positions.keys_BK`.
        needs_key_counts: Whether it reads `Positions.key_counts_BHQ`.
        needs_context: Whether it reads `Positions.context_BQE`.
        rewrites_embeddings: Whether `embed` does more than add, so that the order of schemes matters.
        Options: The dataclass of its options.

    Example:
        >>> @hf_posenc.register_scheme
        ... class LinearPenalty(Scheme):
        ...     name, paper = "linear_penalty", "none"
        ...     def prepare(self, positions):
        ...         return -0.1 * positions.distances.abs().to(positions.dtype)
        ...     def score(self, prepared, layer_params, content):
        ...         return DistanceBias(prepared.expand(self.shape.num_heads, *prepared.shape))
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    extends: ClassVar[bool] = True
    kind: ClassVar[Kind] = Kind.OTHER
    formula: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    neutral: ClassVar[str] = "no parameters"
    tested_against: ClassVar[str] = ""
    recommended: ClassVar[dict[str, Any]] = {}
    inherits_rotation: ClassVar[bool] = False
    at_input: ClassVar[bool] = False
    needs_distances: ClassVar[bool] = True
    needs_key_counts: bool = False
    reads_positions: bool = True
    depends_on_length: bool = False
    needs_key_positions: bool = False
    needs_context: bool = False
    rewrites_embeddings: bool = False
    Options: ClassVar[type[SchemeOptions]] = SchemeOptions

    def __init__(self, options: OptionsT, shape: ModelShape) -> None:
        super().__init__()
        self.options = options
        self.shape = shape

    @classmethod
    def acts(cls, seam: str, options: OptionsT) -> bool:
        """Whether the scheme acts at a seam under some options. By default: if it overrides the seam."""
        return getattr(cls, seam) is not getattr(Scheme, seam)

    def acts_at(self, seam: str) -> bool:
        """Whether this instance acts at a seam."""
        return self.acts(seam, self.options)

    def forward(self, seam: str, *args: object, transform: ParameterTransform | None = None) -> object:
        """Call a seam by name, with every parameter replaced by what `transform` returns for it."""
        if transform is None:
            return getattr(self, seam)(*args)
        with transformed_parameters(self, transform):
            return getattr(self, seam)(*args)

    def prepare(self, positions: Positions) -> PreparedT:
        """Do the work that all layers share, such as angles or buckets.

        Use parameters here only if `torch.is_grad_enabled()` is False: gradient checkpointing reruns the layers, not
        this.

        Args:
            positions: The positions of this forward pass.

        Returns:
            Whatever the other seams need: tensors, or a (named) tuple of tensors, so that it can move between devices.
        """
        return cast(PreparedT, None)

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Put positions into the input embeddings.

        Args:
            inputs_embeds_BQE: Token embeddings, or what the schemes before this one made of them.
            positions: The positions of this forward pass.

        Returns:
            The new embeddings, of the same shape and dtype.
        """
        return inputs_embeds_BQE

    def rotate(self, states_BHQD: torch.Tensor, prepared: PreparedT, keys: bool) -> torch.Tensor:
        """Transform queries, or keys before they enter the cache.

        Args:
            states_BHQD: Queries or keys of the current tokens.
            prepared: The result of `prepare`.
            keys: Whether the states are keys.

        Returns:
            The transformed states, of the same shape.
        """
        return states_BHQD

    def score(self, prepared: PreparedT, layer_params: LayerParams, content: Content) -> Term | list[Term]:
        """Compute what is added to the scaled attention logits.

        Args:
            prepared: The result of `prepare`.
            layer_params: Returns the parameters of this layer's `layer_module`; None without one.
            content: Queries, keys and scaling of this layer.

        Returns:
            One or several terms, each in the cheapest form of `terms` that can express it.
        """
        raise NotImplementedError

    def gate(self, hidden_states_BQE: torch.Tensor, layer_params: LayerParams) -> torch.Tensor:
        """Return what each new token adds to a running sum along its row, which `score` gets as `Content.running_sum`.

        The numbers are kept in the KV cache. Padding adds nothing.

        Args:
            hidden_states_BQE: The input of the attention layer, in float32 or wider.
            layer_params: Returns the parameters of this layer's `layer_module`; None without one.

        Returns:
            One number per head and token, (B, H, Q).
        """
        raise NotImplementedError

    def content_scale(self, prepared: PreparedT, layer_params: LayerParams) -> torch.Tensor:
        """Return a factor for the query-key product, on top of the architecture's own scaling.

        Args:
            prepared: The result of `prepare`.
            layer_params: Returns the parameters of this layer's `layer_module`; None without one.

        Returns:
            The factor of each query, (B or 1, H or 1, Q or 1).
        """
        raise NotImplementedError

    def value(self, prepared: PreparedT, layer_params: LayerParams) -> DistanceTable:
        """Return a vector per distance that is added to the value of every key at that distance."""
        raise NotImplementedError

    def remap(self, prepared: PreparedT) -> Remap | None:
        """Return other rotations for keys that are far from the query; None if no key is far in this forward pass."""
        raise NotImplementedError

    def layer_module(self) -> LayerParameters | None:
        """Create the parameters of one layer, stored in its attention module; None if layers have none of their own."""
        return None

    def uses_rotate_half(self) -> bool:
        """Whether `prepare` returns first a cos and a sin, (B, 1, Q, D), for LLaMA's `rotate_half` formula.

        Architectures with rotary embeddings then apply them in their own code if no other scheme acts in the layer.
        """
        return False

    def keeps_stock_rotation(self) -> bool:
        """Whether the scheme leaves rotations to the architecture's own code, angles included.

        The other seams then get what `with_stock_rotation` returns, in place of what `prepare` returns.
        """
        return False

    def with_stock_rotation(self, prepared: PreparedT, rotate: StockRotate) -> Any:
        """What seams get in place of what `prepare` returned, if the scheme keeps the architecture's own rotation.

        Args:
            prepared: The result of `prepare`.
            rotate: Rotates states as the architecture's own code does in this layer: to their positions, or by offsets,
                which have a name that is unique in this forward pass.
        """
        return rotate

    def details(self, seam: str) -> str:
        """What `explain` adds to a seam, such as the settings that decide what happens there."""
        return ""

    def uses_stock_table(self) -> bool:
        """Whether the scheme keeps and uses the architecture's own position table."""
        return False

    def patch_embedding(self, table: nn.Embedding, scheme_owned: bool) -> nn.Embedding:
        """Replace the architecture's position table. Called only if `uses_stock_table()`.

        Args:
            table: The architecture's table.
            scheme_owned: Whether the architecture must get zeros from it, because `embed` reads the table itself
                (through `Positions.table`).

        Returns:
            The replacement, which must hold the same `weight` parameter, or the table itself to leave it in place.
        """
        return table


class LayerParameters(ParameterModule):
    """Named parameters of a scheme in one layer, or shared by all layers. Calling it returns them by name.

    Read them through the call only, so that hooks which fetch weights (offloading, FSDP, ZeRO) fire.

    Args:
        **parameters: The shape and the initializer of each parameter.

    Example:
        >>> LayerParameters(u=((num_heads, head_size), init.zeros_))()["u"]
    """

    def __init__(self, **parameters: ParameterSpec) -> None:
        super().__init__()
        self.add_parameters(**parameters)

    def forward(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters(recurse=False))
