"""The attention function that variants register with transformers.

It rotates the queries, collects the score terms of the active schemes, and passes on to the stock function of the
backend that the model is set to, or to a path of our own: `dispatch` decides which.

Shape legend: B batch, H heads, Q queries, K keys, D head size, L = Q + K - 1 distances.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..errors import PosEncError
from ..schemes import Content, DistanceTable, Positions, Remap, Term
from .active_schemes import ActiveScheme, callable_schemes
from .chunked import chunked_attention
from .dense import dense_attention, dense_bias_attention, dense_bias_by_heads
from .dispatch import (
    REMAP_BACKEND_ERROR,
    SCORE_BACKENDS,
    VALUE_BACKENDS,
    AttentionCall,
    AttentionOutput,
    AttentionPath,
    DispatchKey,
    has_caps_or_sinks,
    select_path,
)
from .flex import flex_attention_with_terms, run_flex_attention
from .gates import TokenGates
from .masks import visible_pairs
from .remapped import remapped_attention, remapped_attention_chunked, remapped_attention_merged
from .strided import strided_attention, strided_attention_unpadded
from .tensor_parallel import LocalHeads, check_rotations, find_local_heads
from .triton_bias import triton_attention

ATTENTION_NAME = "hf_posenc"


class Projections:
    """What a layer projects its input to. Passed as `posenc`, it is filled in, and `ProjectionsDone` raised."""

    query_BHND: torch.Tensor
    key_BGND: torch.Tensor
    scaling: float
    """What the products of queries and keys are multiplied by."""
    softcap: float | None
    """The bound of the scaled products, in architectures that cap them."""
    sinks_H: torch.Tensor | None
    """The logits of a key without a value, in architectures that have one per head."""


class ProjectionsDone(Exception):
    """Ends a forward of which only the projections are wanted."""


class LayerSchemes(NamedTuple):
    """The schemes that act in one layer, by seam."""

    positions: Positions
    rotate: Sequence[ActiveScheme]
    score: Sequence[ActiveScheme]
    content_scale: Sequence[ActiveScheme]
    value: Sequence[ActiveScheme]
    stock_rotation: Sequence[ActiveScheme]
    """Rotations that are left to the architecture's own code."""
    remap: Sequence[ActiveScheme] = ()
    gates: TokenGates | None = None
    """What the tokens of this call add to running sums, if a scheme acts at `gate`."""


def apply_rotation(states_BHQD: torch.Tensor, rotations: Sequence[ActiveScheme], keys: bool) -> torch.Tensor:
    """Rotate queries, or keys before they are cached."""
    for scheme, prepared, _ in rotations:
        states_BHQD = scheme("rotate", states_BHQD, prepared, keys)
    return states_BHQD


def score_terms(
    schemes: Sequence[ActiveScheme],
    content: Content,
    local_heads: LocalHeads | None = None,
    gates: TokenGates | None = None,
) -> list[Term]:
    """Everything that schemes add to the scaled logits, of all heads or those of this process."""
    terms: list[Term] = []
    calls = callable_schemes(schemes, local_heads)
    for (scheme, *_), (call, prepared, layer_params) in zip(schemes, calls, strict=True):
        content.running_sum = None if gates is None else gates.running_sum(scheme, content.key_BGKD)
        scheme_terms = call("score", prepared, layer_params, content)
        terms.extend(scheme_terms if isinstance(scheme_terms, list) else [scheme_terms])
    return terms if local_heads is None else [local_heads.select_term(term) for term in terms]


def scale_content(
    query_BHQD: torch.Tensor, schemes: Sequence[ActiveScheme], local_heads: LocalHeads | None = None
) -> torch.Tensor:
    """Apply the factors of the schemes that rescale query times key."""
    for call, prepared, layer_params in callable_schemes(schemes, local_heads):
        factors_BHQ = call("content_scale", prepared, layer_params)
        factors_BHQ = factors_BHQ if local_heads is None else local_heads.select(factors_BHQ, 1)
        # Multiplied in the wider dtype, as Llama 4 does, then rounded once.
        query_BHQD = (query_BHQD * factors_BHQ.to(query_BHQD.device).unsqueeze(-1)).to(query_BHQD.dtype)
    return query_BHQD


def value_tables(schemes: Sequence[ActiveScheme], local_heads: LocalHeads | None) -> list[DistanceTable]:
    """The vectors per distance that schemes add to the values, of all heads or those of this process."""
    tables = [
        call("value", prepared, layer_params) for call, prepared, layer_params in callable_schemes(schemes, local_heads)
    ]
    return tables if local_heads is None else [local_heads.select_table(table) for table in tables]


def far_rotation(schemes: Sequence[ActiveScheme]) -> Remap | None:
    """The other rotation of far keys, if a scheme has one and the input has far keys."""
    for scheme, prepared, _ in schemes:
        remap: Remap | None = scheme("remap", prepared)
        return remap
    return None


def posenc_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    posenc: LayerSchemes | Projections | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """Compute attention under the layer's schemes, on the backend of the model. `module` is a `PosEncAttention`."""
    if posenc is None:
        raise PosEncError(f"attn_implementation={ATTENTION_NAME!r} is internal; choose one of {SCORE_BACKENDS}")
    if module.scales_queries and (isinstance(posenc, Projections) or posenc.score or posenc.value):
        query, kwargs["scaling"] = query / module.scaling, module.scaling  # schemes add to what is scaled
    if isinstance(posenc, Projections):
        posenc.query_BHND, posenc.key_BGND = query, key
        posenc.scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        posenc.softcap, posenc.sinks_H = kwargs.get("softcap"), kwargs.get("s_aux")
        raise ProjectionsDone
    if kwargs.get("cache") is not None:
        raise PosEncError("hf_posenc does not support continuous batching (paged caches); use generate()")
    positions, backend = posenc.positions, posenc.positions.backend
    if attention_mask is None:
        check_direction(module.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"], positions.causal)
    stock: Callable[..., AttentionOutput] = ALL_ATTENTION_FUNCTIONS.get_interface(backend, module.stock_eager)
    unrotated_query = query
    if posenc.rotate:
        check_rotations(query, [active.scheme for active in posenc.rotate])
        query = apply_rotation(query, posenc.rotate, keys=False)
        if module.cache_argument is None:  # otherwise rotated on their way into the cache
            key = apply_rotation(key, posenc.rotate, keys=True)
    if not posenc.score and not posenc.value and far_rotation(posenc.remap) is None:
        if posenc.content_scale:
            local_heads = find_local_heads(module, query, key, [active.scheme for active in posenc.content_scale])
            query = scale_content(query, posenc.content_scale, local_heads)
        if backend == "flex_attention" and not has_caps_or_sinks(kwargs):
            return run_flex_attention(module, query, key, value, attention_mask, **kwargs)
        if is_flash_attention_requested(requested_attention_implementation=backend):
            if not positions.packed:  # flash infers documents from position_ids and would mistake gaps for them
                kwargs.pop("position_ids", None)
            module = _with_stock_config(module)
        return stock(module, query, key, value, attention_mask, **kwargs)
    call = _prepare_call(module, stock, unrotated_query, query, key, value, attention_mask, posenc, kwargs)
    path, reason = select_path(DispatchKey.of(call))
    if path is AttentionPath.REFUSED:
        check_backend(backend, [active.scheme for active in (*posenc.score, *posenc.value, *posenc.remap)])
        raise PosEncError(reason)
    output, weights = PATHS[path](call)
    return output, weights if backend == "eager" else None  # matches SDPA, which returns no weights


def _prepare_call(
    module: Any,
    stock: Callable[..., AttentionOutput],
    unrotated_query: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    posenc: LayerSchemes,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """Collect what the schemes add, and bring everything to the dtype of the kernels."""
    positions = posenc.positions
    if key.shape[2] != positions.key_length and kwargs.get("sliding_window") is not None:
        positions = positions.of_window(key.shape[2])
        posenc = module.layer_schemes(positions)._replace(gates=posenc.gates)
    if key.shape[2] != positions.key_length:
        raise PosEncError(
            f"The cache returned {key.shape[2]} keys where {positions.key_length} were expected. This cache class "
            "drops or moves keys, so their positions are lost; use DynamicCache or StaticCache"
        )
    dtype, device = value.dtype, value.device.type
    if dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # narrows what a float32 rotation, or a cache of such keys, widened
    if not query.dtype == key.dtype == value.dtype == dtype:
        unrotated_query, query, key, value = (states.to(dtype) for states in (unrotated_query, query, key, value))
    causal = positions.causal and query.shape[2] > 1 and attention_mask is None
    scaling = kwargs.pop("scaling", None) or query.shape[-1] ** -0.5
    per_head = [active.scheme for active in (*posenc.score, *posenc.value, *posenc.content_scale)]
    local_heads = find_local_heads(module, query, key, per_head) if per_head else None
    content = Content(
        unrotated_query,
        query,
        key,
        scaling,
        lambda: visible_pairs(attention_mask, causal, query, positions.key_length),
        module.project_rows if local_heads is None else local_heads.with_partial_gradients(module.project_rows),
        None if local_heads is None else local_heads.heads,
    )
    terms = score_terms(posenc.score, content, local_heads, posenc.gates)
    scaled_query = scale_content(query, posenc.content_scale, local_heads) if posenc.content_scale else query
    if causal and key.shape[2] > query.shape[2]:  # slots of a static cache that a first call leaves empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return AttentionCall(
        module=module,
        stock=stock,
        query=scaled_query,
        key=key,
        value=value,
        attention_mask=attention_mask,
        causal=causal,
        scaling=scaling,
        dropout=kwargs.pop("dropout", 0.0),
        terms=terms,
        value_tables=value_tables(posenc.value, local_heads),
        positions=positions,
        content=content,
        stock_kwargs=kwargs,
        remap=far_rotation(posenc.remap),
    )


PATHS: dict[AttentionPath, Callable[[AttentionCall], AttentionOutput]] = {
    AttentionPath.FLEX: flex_attention_with_terms,
    AttentionPath.TRITON: triton_attention,
    AttentionPath.STRIDED_BIAS: strided_attention,
    AttentionPath.STRIDED_BIAS_UNPADDED: strided_attention_unpadded,
    AttentionPath.CHUNKED: chunked_attention,
    AttentionPath.DENSE_BIAS_BY_HEADS: dense_bias_by_heads,
    AttentionPath.DENSE_BIAS: dense_bias_attention,
    AttentionPath.DENSE_WEIGHTS: dense_attention,
    AttentionPath.REMAPPED_MERGED: remapped_attention_merged,
    AttentionPath.REMAPPED_CHUNKED: remapped_attention_chunked,
    AttentionPath.REMAPPED_DENSE: remapped_attention,
}


def check_direction(asked: bool, causal: bool) -> None:
    """Raise PosEncError if attention is asked to be causal, or not to be, against what the schemes were built for."""
    if bool(asked) != causal:
        raise PosEncError(
            f"The model was built with is_causal={causal}, and its position scheme depends on that, but its attention "
            f"is asked for is_causal={bool(asked)}: set it in the config before you build or load the model"
        )


def check_backend(backend: str | None, schemes: Sequence[Any]) -> None:
    """Raise PosEncError if a backend cannot add the terms of a scheme, or scheme spec, and would drop them.

    A name that means nothing to transformers is left to its own error.
    """
    if backend is None or (backend.isidentifier() and not _is_known(backend)):
        return
    for seam, backends in (("score", SCORE_BACKENDS), ("value", VALUE_BACKENDS)):
        names = [scheme.name for scheme in schemes if backend not in backends and scheme.acts_at(seam)]
        if names:
            raise PosEncError(
                f"attn_implementation={backend!r} cannot add the {seam} term of position scheme {names[0]!r} and would "
                f"drop it; use one of {list(backends)}"
            )
    if backend not in VALUE_BACKENDS and any(scheme.acts_at("remap") for scheme in schemes):
        raise PosEncError(REMAP_BACKEND_ERROR.format(backend=f"attn_implementation={backend!r}"))


def _is_known(backend: str) -> bool:
    is_flash = is_flash_attention_requested(requested_attention_implementation=backend)
    return is_flash or backend in ALL_ATTENTION_FUNCTIONS.valid_keys()


def _with_stock_config(module: Any) -> Any:
    """A stand-in for functions that read the backend from the module's config, as flash attention does."""
    return types.SimpleNamespace(
        config=module.stock_config,
        training=module.training,
        is_causal=module.is_causal,
        layer_idx=module.layer_idx,
        modules=module.modules,
    )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, posenc_attention_forward)
