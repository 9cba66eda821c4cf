"""The one seam into attention: a subclass of the stock class, and the attention function it is made to call.

The subclass runs the stock forward unchanged, with two stand-ins: a cache whose `update` turns keys before they are
kept, and a config that names the function below. That function turns the queries, adds the scheme's score terms to
the mask, and hands over to the stock function of the backend that the model is set to.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from .positions import self_attention_cache
from .scheme import DistanceBias, Positions, Scheme, tracing

NAME = "hf_posenc"
CAN_ADD_SCORES = ("sdpa", "eager", "flex_attention")


class AttentionConfig:
    """A view of the model's config, the same in everything but the attention function it names."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class TurningCache:
    """Stands in for the cache in one attention call: turns the new keys, then passes them on to the real one."""

    def __init__(self, cache: Any, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._cache = cache
        self._turn = turn

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = self._turn(keys)
        return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class PositionedAttention(nn.Module):
    """Mixed in before a stock self-attention class. Carries no state of its own but a scheme's parts of this layer."""

    stock_eager: Callable[..., Any]
    """The architecture's own eager attention function."""
    layer_idx: int
    is_causal: bool

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(self.__dict__["config"])

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config

    def forward(self, *args: Any, posenc: Positions | None = None, **kwargs: Any) -> Any:
        if posenc is None:
            raise ValueError(
                f"{type(self).__name__} was called without positions: call the model it belongs to, not the layer"
            )
        turns = schemes_at("rotate", self, posenc)
        if turns:
            cache = self_attention_cache(kwargs.get("past_key_values"))
            kwargs["past_key_values"] = TurningCache(cache, lambda keys: turned(keys, turns, True))
        return super().forward(*args, posenc=posenc, **kwargs)


def schemes_at(seam: str, module: PositionedAttention, posenc: Positions) -> list[tuple[Scheme, Any, nn.Module | None]]:
    """The schemes that act at a seam of this layer, each with what it prepared and its part of the layer."""
    parts = getattr(module, "position_scheme", None)
    found = []
    for place in posenc.active[module.layer_idx]:
        scheme = posenc.schemes[place]
        if scheme.overrides(seam):
            part = parts[str(place)] if parts is not None and str(place) in parts else None
            found.append((scheme, posenc.prepared[place], part))
    return found


def turned(states_BHQD: torch.Tensor, turns: list[tuple[Scheme, Any, Any]], keys: bool) -> torch.Tensor:
    for scheme, prepared, _ in turns:
        states_BHQD = scheme("rotate", states_BHQD, prepared, keys)
    return states_BHQD


def positioned_attention(
    module: PositionedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    posenc: Positions | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Registered with transformers: attention under a position scheme, on whichever backend the model is set to."""
    if posenc is None:
        raise ValueError(f"attn_implementation={NAME!r} is for hf_posenc's own use; choose one of {CAN_ADD_SCORES}")
    if kwargs.get("cache") is not None:
        raise ValueError("hf_posenc does not support continuous batching (paged caches); use generate()")
    config = module.__dict__["config"]
    backend = config._attn_implementation
    query = turned(query, schemes_at("rotate", module, posenc), False)
    scoring = schemes_at("score", module, posenc)
    terms = [scheme("score", prepared, part) for scheme, prepared, part in scoring]
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(backend, module.stock_eager)
    if not terms and backend != "flex_attention":
        if is_flash_attention_requested(requested_attention_implementation=backend):
            if not posenc.packed:  # flash reads documents off position_ids, and would take gaps for them
                kwargs.pop("position_ids", None)
            module = _with_real_config(module, config)
        return stock(module, query, key, value, attention_mask, **kwargs)

    if not terms:
        return flex(module, query, key, value, attention_mask, None, **kwargs)
    refuse_backend(backend, [scheme for scheme, _, _ in scoring])
    if key.shape[2] != posenc.key_length:
        raise ValueError(
            f"the cache handed out {key.shape[2]} keys where {posenc.key_length} were expected: this cache class "
            "drops or moves keys, so their positions are lost; use DynamicCache or StaticCache"
        )
    asked = kwargs.get("is_causal")
    causal = (module.is_causal if asked is None else asked) and query.shape[2] > 1 and attention_mask is None
    empty = key.shape[2] - query.shape[2] if causal else 0  # slots of a static cache that a first call leaves empty
    if empty:
        key, value = key[:, :, :-empty], value[:, :, :-empty]
    values = added_up(terms, posenc, query)
    values = values[..., : values.shape[-1] - empty]
    by_distance = values.dim() == 2
    if backend == "flex_attention":
        return flex(module, query, key, value, attention_mask, values, **kwargs)
    if backend == "sdpa" and attention_mask is None and by_distance and _strided_bias_pays(query):
        return sdpa_strided(stock, module, query, key, value, values, causal, **kwargs)
    bias = dense_bias(values, query.shape[2], key.shape[2]) if by_distance else values
    return stock(module, query, key, value, masked(bias.to(query.dtype), attention_mask, causal), **kwargs)


def added_up(terms: list[DistanceBias | torch.Tensor], posenc: Positions, query: torch.Tensor) -> torch.Tensor:
    """The sum of all terms: (H, L) by distance if that says it all, else (B or 1, H, Q, K)."""
    by_distance = [term.values.to(query.device) for term in terms if isinstance(term, DistanceBias)]
    whole = [term.to(query.device) for term in terms if isinstance(term, torch.Tensor)]
    if posenc.uniform and not whole:
        return reduce(torch.add, by_distance)
    for values in by_distance:
        whole.append(
            dense_bias(values, query.shape[2], posenc.key_length) if posenc.uniform else values.transpose(0, 1)
        )
    return reduce(torch.add, whole)


def refuse_backend(backend: str | None, schemes: list[Any]) -> None:
    """Raise if a backend cannot add the score terms of any of the schemes, which are classes or modules."""
    scoring = [scheme.name for scheme in schemes if scheme.overrides("score")]
    if scoring and backend is not None and backend not in CAN_ADD_SCORES:
        raise ValueError(
            f"attn_implementation={backend!r} cannot add the score term of position scheme {scoring[0]!r} and would "
            f"drop it; use one of {list(CAN_ADD_SCORES)}"
        )


def dense_bias(values_HL: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """(1, H, Q, K) of the values by distance."""
    if tracing():  # a view of a symbolic length would fix the length
        keys, queries = (torch.arange(length, device=values_HL.device) for length in (num_keys, num_queries))
        return values_HL[:, keys - queries[:, None] + num_queries - 1][None]
    return rows_by_falling_query(values_HL, num_keys).flip(-2)[None]


def rows_by_falling_query(values_HL: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(H, Q, K), last query first: a view of the one vector of each head, not a copy."""
    return values_HL.unfold(-1, num_keys, 1)


def masked(bias: torch.Tensor, attention_mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """The bias with the lowest finite number where there is nothing to see."""
    lowest = torch.finfo(bias.dtype).min
    if attention_mask is None:
        if not causal:
            return bias
        attention_mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    else:
        attention_mask = attention_mask[..., : bias.shape[-1]]
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, bias, lowest)
    return (bias + attention_mask.to(bias.dtype)).clamp(min=lowest)


def _strided_bias_pays(query: torch.Tensor) -> bool:
    # Elsewhere the kernels want an aligned mask and would copy the view. Compiled code would copy it too.
    return query.device.type == "cpu" and query.shape[2] > 1 and not tracing()


def sdpa_strided(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    causal: bool,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA with the bias as a strided view of one vector per head: no Q x K tensor, however long the input.

    Row q of the bias is the vector read from Q - 1 - q on, so with the queries in reverse, row t is read from t on,
    which is a view with both strides 1.
    """
    values_HL = values_HL.to(query.dtype)
    if causal:
        ahead = torch.arange(values_HL.shape[-1], device=values_HL.device) >= query.shape[2]
        values_HL = values_HL.masked_fill(ahead, float("-inf"))
    view = rows_by_falling_query(values_HL, key.shape[2])[None]
    output_BQHD, weights = stock(module, query.flip(2), key, value, view, **kwargs)
    return output_BQHD.flip(1), weights


def flex(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    values: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """flex_attention with a score_mod that reads the values, and a mask that may be a plain tensor."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if dropout > 0:
        raise ValueError(
            "flex_attention has no dropout: call model.eval(), set the attention dropout to 0, or use "
            'attn_implementation="sdpa"'
        )
    block_mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    added = None if block_mask is not None else attention_mask
    if added is not None and added.dtype == torch.bool:
        added = torch.where(added, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    last_query, by_distance = query.shape[2] - 1, values is not None and values.dim() == 2
    if values is not None:
        values = values.to(query.dtype)
        values = values if by_distance else values.expand(query.shape[0], -1, -1, -1)

    def score_mod(score: Any, row: Any, head: Any, q: Any, k: Any) -> Any:
        if values is not None:
            score = score + (values[head, k - q + last_query] if by_distance else values[row, head, q, k])
        return score if added is None else score + added[row, 0, q, k]

    on_cpu = query.device.type == "cpu"  # torch 2.13's CPU kernels fail to compile where lengths change between calls
    output_BHQD = (flex_attention if on_cpu else partial(compile_friendly_flex_attention, training=module.training))(
        query,
        key,
        value,
        score_mod=None if values is None and added is None else score_mod,
        block_mask=block_mask,
        enable_gqa=query.shape[1] != key.shape[1],
        scale=scaling,
        kernel_options=kwargs.get("kernel_options"),
    )
    return output_BHQD.transpose(1, 2).contiguous(), None


def _with_real_config(module: PositionedAttention, config: Any) -> Any:
    """The module for functions that look its config's backend up: flash attention does."""
    return types.SimpleNamespace(
        config=config,
        training=module.training,
        is_causal=module.is_causal,
        layer_idx=module.layer_idx,
        modules=module.modules,
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, positioned_attention)
