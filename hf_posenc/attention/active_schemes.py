"""The schemes that act in a layer, and how their seams are called if tensor parallelism divides the heads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..schemes import LayerParams, Scheme
from .tensor_parallel import LocalHeads


class ActiveScheme(NamedTuple):
    """A scheme that acts in a layer, with what it prepared for this forward pass and its parameters of the layer."""

    scheme: Scheme
    prepared: Any
    layer_params: LayerParams | None


def callable_schemes(
    schemes: Sequence[ActiveScheme], local_heads: LocalHeads | None
) -> Iterator[tuple[Callable[..., Any], Any, LayerParams | None]]:
    """The schemes as functions of a seam; if heads are divided, gradients of parameters are summed over processes."""
    for scheme, prepared, layer_params in schemes:
        if local_heads is None:
            yield scheme, prepared, layer_params
        else:
            call = functools.partial(scheme, transform=local_heads.sum_gradients)
            yield call, prepared, _transformed_params(layer_params, local_heads)


def _transformed_params(layer_params: LayerParams | None, local_heads: LocalHeads) -> LayerParams | None:
    if layer_params is None:
        return None
    return lambda: {name: local_heads.sum_gradients(parameter) for name, parameter in layer_params().items()}
