"""The one seam into attention: a subclass of the stock class, and the attention function it is made to call.

The subclass runs the stock forward unchanged, with two stand-ins: a cache whose `update` turns keys before they are
kept, and a config that names the function below. That function turns the queries, adds the scheme's score terms to
the mask, and hands over to the stock function of the backend that the model is set to, or to a way of its own: `paths`
chooses.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..schemes.base import LayerParams, Scheme
from ..schemes.inputs import Content, Positions, is_tracing, repeat_key_heads
from ..schemes.terms import Term
from .cache import self_attention_cache
from .call import AttentionCall, AttentionOutput
from .chunked import chunked_attention
from .dense import dense_attention, dense_bias_attention, dense_bias_by_heads
from .dispatch import SCORE_BACKENDS, VALUE_BACKENDS, AttentionPath, DispatchKey, MaskKind, select_path
from .flex import flex_attention_with_terms, run_flex_attention
from .masks import visible_pairs
from .strided import strided_attention, strided_attention_unpadded

ATTENTION_NAME = "hf_posenc"


class AttentionConfig:
    """A view of the model's config, the same in everything but the attention function it names."""

    _attn_implementation = ATTENTION_NAME

    def __init__(self, config: Any) -> None:
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class RotatingCache:
    """Stands in for the cache in one attention call: turns the new keys, then passes them on to the real one."""

    def __init__(self, cache: Any, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._cache = cache
        self._turn = turn

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = self._turn(keys)
        return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class PosEncAttention(nn.Module):
    """Mixed in before a stock self-attention class. Carries no state of its own but a scheme's parts of this layer."""

    stock_eager: Callable[..., Any]
    """The architecture's own eager attention function."""
    layer_idx: int
    is_causal: bool

    def projected(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States through the layer's own query and key projections, called as the modules they are."""
        raise AssertionError("every architecture has its own")

    def project_rows(self, states: torch.Tensor, like_BHQD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by head, two of (H, R, D); the keys of a group of heads once for each head."""
        queries, keys = (
            found.unflatten(-1, (-1, like_BHQD.shape[-1])).transpose(0, 1) for found in self.projected(states)
        )
        return queries, repeat_key_heads(keys[None], like_BHQD.shape[1])[0]

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
            kwargs["past_key_values"] = RotatingCache(cache, lambda keys: apply_rotation(keys, turns, True))
        return super().forward(*args, posenc=posenc, **kwargs)


def schemes_at(seam: str, module: PosEncAttention, posenc: Positions) -> list[tuple[Scheme, Any, LayerParams | None]]:
    """The schemes that act at a seam of this layer, each with what it prepared and its part of the layer."""
    parts = getattr(module, "position_scheme", None)
    found = []
    for place in posenc.active[module.layer_idx][seam]:
        part = parts[str(place)].__call__ if parts is not None and str(place) in parts else None
        found.append((posenc.schemes[place], posenc.prepared[place], part))
    return found


def apply_rotation(states_BHQD: torch.Tensor, turns: list[tuple[Scheme, Any, Any]], keys: bool) -> torch.Tensor:
    for scheme, prepared, _ in turns:
        states_BHQD = scheme("rotate", states_BHQD, prepared, keys)
    return states_BHQD


def _kernel_dtype(value: torch.Tensor) -> torch.dtype:
    """What kernels compute in: autocast narrows what a rotation in float32, or a cache of such keys, has made wide."""
    device = value.device.type
    if value.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return value.dtype
    return torch.get_autocast_dtype(device)


def posenc_attention_forward(
    module: PosEncAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    posenc: Positions | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Registered with transformers: attention under a position scheme, on whichever backend the model is set to."""
    if posenc is None:
        raise ValueError(
            f"attn_implementation={ATTENTION_NAME!r} is for hf_posenc's own use; choose one of {SCORE_BACKENDS}"
        )
    if kwargs.get("cache") is not None:
        raise ValueError("hf_posenc does not support continuous batching (paged caches); use generate()")
    config = module.__dict__["config"]
    backend = config._attn_implementation
    plain_query, query = query, apply_rotation(query, schemes_at("rotate", module, posenc), False)
    scoring, valuing = schemes_at("score", module, posenc), schemes_at("value", module, posenc)
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(backend, module.stock_eager)
    if not scoring and not valuing:
        if backend == "flex_attention":
            return run_flex_attention(module, query, key, value, attention_mask, **kwargs)
        if is_flash_attention_requested(requested_attention_implementation=backend):
            if not posenc.packed:  # flash reads documents off position_ids, and would take gaps for them
                kwargs.pop("position_ids", None)
            module = _with_real_config(module, config)
        return stock(module, query, key, value, attention_mask, **kwargs)

    check_backend(backend, [scheme for scheme, _, _ in scoring + valuing])
    if key.shape[2] != posenc.key_length:
        raise ValueError(
            f"the cache handed out {key.shape[2]} keys where {posenc.key_length} were expected: this cache class "
            "drops or moves keys, so their positions are lost; use DynamicCache or StaticCache"
        )
    dtype = _kernel_dtype(value)
    if not query.dtype == key.dtype == value.dtype == dtype:
        plain_query, query, key, value = (states.to(dtype) for states in (plain_query, query, key, value))
    asked = kwargs.get("is_causal")
    causal = (module.is_causal if asked is None else asked) and query.shape[2] > 1 and attention_mask is None
    scaling = kwargs.pop("scaling", None) or query.shape[-1] ** -0.5
    content = Content(
        plain_query,
        query,
        key,
        scaling,
        lambda: visible_pairs(attention_mask, causal, query, posenc.key_length),
        lambda states: module.project_rows(states, plain_query),
    )
    terms = score_terms(scoring, content)
    for scheme, _, part in schemes_at("content_scale", module, posenc):
        query = query * scheme("content_scale", part).to(query)[:, None, None]
    if causal and key.shape[2] > query.shape[2]:  # slots of a static cache that a first call leaves empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    call = AttentionCall(
        module=module,
        stock=stock,
        query=query,
        key=key,
        value=value,
        attention_mask=attention_mask,
        causal=causal,
        scaling=scaling,
        dropout=kwargs.pop("dropout", 0.0),
        terms=terms,
        value_tables=[scheme("value", prepared, part) for scheme, prepared, part in valuing],
        positions=posenc,
        content=content,
        stock_kwargs=kwargs,
    )
    path, why = select_path(dispatch_key(call, backend))
    if path is AttentionPath.REFUSED:
        raise ValueError(why)
    output, weights = run_path(call, path)
    return output, weights if backend == "eager" else None  # as sdpa does in layers where it is sdpa


def score_terms(scoring: list[tuple[Scheme, Any, LayerParams | None]], content: Content) -> list[Term]:
    """What all schemes that act on the scores of a layer want added."""
    terms: list[Term] = []
    for scheme, prepared, part in scoring:
        found = scheme("score", prepared, part, content)
        terms.extend(found if isinstance(found, list) else [found])
    return terms


def dispatch_key(call: AttentionCall, backend: str) -> DispatchKey:
    mask = call.attention_mask
    known = MaskKind.NONE if mask is None else MaskKind.PADDING if call.positions.spans is not None else MaskKind.OTHER
    return DispatchKey(
        backend=backend,
        term_types=frozenset(map(type, call.terms)),
        has_value_terms=bool(call.value_tables),
        uniform=call.positions.uniform,
        mask=known,
        single_query=call.query.shape[2] < 2,
        on_cpu=call.query.device.type == "cpu",
        tracing=is_tracing(),
        requires_grad=call.requires_grad(),
        mask_requires_grad=isinstance(mask, torch.Tensor) and mask.requires_grad,
        dropout=call.dropout > 0,
    )


PATHS: dict[AttentionPath, Callable[[AttentionCall], AttentionOutput]] = {
    AttentionPath.FLEX: flex_attention_with_terms,
    AttentionPath.STRIDED_BIAS: strided_attention,
    AttentionPath.STRIDED_BIAS_UNPADDED: strided_attention_unpadded,
    AttentionPath.CHUNKED: chunked_attention,
    AttentionPath.DENSE_BIAS_BY_HEADS: dense_bias_by_heads,
    AttentionPath.DENSE_BIAS: dense_bias_attention,
    AttentionPath.DENSE_WEIGHTS: dense_attention,
}


def run_path(call: AttentionCall, path: AttentionPath) -> AttentionOutput:
    """Compute an attention along a path."""
    return PATHS[path](call)


def check_backend(backend: str | None, schemes: list[Any]) -> None:
    """Raise if a backend cannot add the terms of any of the schemes, which are items of the grammar or modules."""
    if backend is None:
        return
    for seam, able in (("score", SCORE_BACKENDS), ("value", VALUE_BACKENDS)):
        acting = [scheme.name for scheme in schemes if scheme.acts_at(seam)]
        if acting and backend not in able:
            raise ValueError(
                f"attn_implementation={backend!r} cannot add the {seam} term of position scheme {acting[0]!r} and "
                f"would drop it; use one of {list(able)}"
            )


def _with_real_config(module: PosEncAttention, config: Any) -> Any:
    """The module for functions that look its config's backend up: flash attention does."""
    return types.SimpleNamespace(
        config=config,
        training=module.training,
        is_causal=module.is_causal,
        layer_idx=module.layer_idx,
        modules=module.modules,
    )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, posenc_attention_forward)
