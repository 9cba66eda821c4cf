"""Running sums of gates: what each token adds to them, kept in the KV cache.

A gate is a number per head and token that a scheme computes from hidden states (`Scheme.gate`). Later queries need the
gates of all earlier tokens, so these are stored as further features of the token's key, and split off again when the
cache returns its keys. Whatever a cache does with keys, it then does with gates: beams reorder them, assisted decoding
crops them, sliding windows drop them, and static caches have slots for them. A query head has its own gate, so a key
has as many further features as heads share it, or twice as many in half precision, where one number cannot hold the
gate. Gates are stored, not their sums: a sum would lose its last digits, and would be wrong once a cache drops keys.

Shape legend: B batch, H heads, G key heads, N heads per key head, Q new tokens, K all tokens, D head size,
E hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache

from ..errors import PosEncError
from ..schemes import Positions, RunningSum, Scheme
from .active_schemes import ActiveScheme, callable_schemes
from .tensor_parallel import LocalHeads, find_local_heads

UpdateCache = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TokenGates:
    """The gates of one attention call: those of the new tokens, then those of all tokens that the cache returns.

    Args:
        module: The attention module, a `PosEncAttention`.
        schemes: The schemes of the layer that act at `gate`, at least one.
        hidden_states_BQE: The input of the layer.
        positions: The positions of this forward pass.
    """

    def __init__(
        self, module: Any, schemes: Sequence[ActiveScheme], hidden_states_BQE: torch.Tensor, positions: Positions
    ) -> None:
        self.module, self.schemes, self.positions = module, schemes, positions
        self.hidden_states_BQE = hidden_states_BQE
        self._gates: list[torch.Tensor] | None = None

    def update_cache(
        self, key_BGQD: torch.Tensor, value_BGQD: torch.Tensor, layer: object, update: UpdateCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys together with the gates of their tokens.

        Args:
            key_BGQD: The keys of the new tokens, as they are to be cached.
            value_BGQD: The values of the new tokens.
            layer: The layer of the cache, if it exists already.
            update: Stores keys and values in the cache, and returns all of them.

        Returns:
            All keys, without the gates, and all values.

        Raises:
            PosEncError: If the cache rounds what it stores, or has keys that were stored without gates.
        """
        num_key_heads, head_size = key_BGQD.shape[1], key_BGQD.shape[-1]
        features = []
        for gates_BHQ in self._new_gates(key_BGQD):
            gates_BGQN = gates_BHQ.unflatten(1, (num_key_heads, -1)).transpose(-1, -2)
            features.extend(split_gates(gates_BGQN, key_BGQD.dtype))
        widened = torch.cat([key_BGQD, *features], dim=-1)
        _check_layer(layer, widened.shape[-1])
        keys, values = update(widened, value_BGQD)
        sizes = [head_size, *(feature.shape[-1] for feature in features)]
        key_BGKD, *stored = keys.split(sizes, dim=-1)
        parts = len(features) // len(self.schemes)
        wide = torch.promote_types(keys.dtype, torch.float32)
        self._gates = [
            sum_parts(stored[first : first + parts], wide).transpose(-1, -2).flatten(1, 2)
            for first in range(0, len(stored), parts)
        ]
        return key_BGKD, values

    def running_sum(self, scheme: Scheme, key_BGKD: torch.Tensor) -> RunningSum | None:
        """The running sums of a scheme's gates, for the keys of this call; None if the scheme has no gates."""
        index = next((index for index, active in enumerate(self.schemes) if active.scheme is scheme), None)
        if index is None:
            return None
        gates_BHK = (self._gates or self._new_gates(key_BGKD))[index]
        if gates_BHK.shape[-1] != key_BGKD.shape[2]:
            raise PosEncError(
                f"position scheme {scheme.name!r} has gates of {gates_BHK.shape[-1]} tokens, but the layer attends to "
                f"{key_BGKD.shape[2]} keys: layers that use the keys of another layer are not supported"
            )
        # Differences of long sums: in float64, where the device supports it.
        sums_BHK = gates_BHK.to(torch.float32 if gates_BHK.device.type == "mps" else torch.float64).cumsum(-1)
        return RunningSum(self._at_queries(sums_BHK), sums_BHK)

    def _at_queries(self, sums_BHK: torch.Tensor) -> torch.Tensor:
        """(B, H, Q): of all tokens, the new ones. They follow the cached ones; in a full window, they are the last."""
        num_queries, num_cached = self.hidden_states_BQE.shape[1], self.positions.num_cached
        last_start = sums_BHK.shape[-1] - num_queries
        if isinstance(num_cached, int):
            return sums_BHK.narrow(-1, min(num_cached, last_start), num_queries)
        slots = torch.arange(num_queries, device=sums_BHK.device) + num_cached.to(sums_BHK.device).clamp(max=last_start)
        return sums_BHK.index_select(-1, slots)

    def _new_gates(self, key_BGKD: torch.Tensor) -> list[torch.Tensor]:
        """(B, H, Q) for each scheme: the gates of the new tokens, for the heads of this process."""
        local_heads = self._local_heads(key_BGKD)
        states_BQE = self._wide_hidden_states()
        if local_heads is not None:  # each process has the part of the gradient that comes from its heads
            states_BQE = local_heads.sum_gradients(states_BQE)
        gates = []
        for call, _, layer_params in callable_schemes(self.schemes, local_heads):
            with _without_autocast(states_BQE.device.type):
                gates_BHQ = call("gate", states_BQE, layer_params)
            if self.positions.tokens_BHQ is not None:
                gates_BHQ = gates_BHQ.masked_fill(~self.positions.tokens_BHQ.to(gates_BHQ.device), 0.0)
            gates.append(gates_BHQ if local_heads is None else local_heads.select(gates_BHQ, 1))
        return gates

    def _wide_hidden_states(self) -> torch.Tensor:
        states_BQE, scheme = self.hidden_states_BQE, self.schemes[0].scheme
        if states_BQE.dim() != 3 or states_BQE.shape[-1] != scheme.shape.hidden_size:
            raise PosEncError(
                f"position scheme {scheme.name!r} reads hidden states of width {scheme.shape.hidden_size}, but the "
                f"input of this attention layer has shape {tuple(states_BQE.shape)}: leave the layer out by `layers`"
            )
        return states_BQE.to(torch.promote_types(states_BQE.dtype, torch.float32))

    def _local_heads(self, key_BGKD: torch.Tensor) -> LocalHeads | None:
        """The heads that this process has, told from its keys, before there are queries; None: all."""
        num_heads = key_BGKD.shape[1] * getattr(self.module, "num_key_value_groups", 1)
        schemes = [active.scheme for active in self.schemes]
        if num_heads == schemes[0].shape.num_heads or self.module.process_rank() is None:
            return None
        queries = key_BGKD[:, :1].expand(-1, num_heads, -1, -1)  # only the number of heads is read
        return find_local_heads(self.module, queries, key_BGKD, schemes)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Keep what is computed inside in its dtype; the meta device has no autocast."""
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def split_gates(gates: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of a dtype that add up to the gates: one, or two if half precision would round them."""
    if torch.promote_types(dtype, torch.float32) == dtype:
        return [gates.to(dtype)]
    limit = torch.finfo(dtype).max
    gates = gates.clamp(-limit, limit)
    rounded = gates.to(dtype)
    return [rounded, (gates - rounded.to(gates.dtype)).to(dtype)]


def sum_parts(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The gates that were split."""
    first, *rest = (part.to(dtype) for part in parts)
    for part in rest:
        first = first + part
    return first


def cache_layer(cache: Cache, index: object) -> object:
    """A layer of a cache; None if it does not exist yet."""
    layers = getattr(cache, "layers", ())
    return layers[index] if isinstance(index, int) and index < len(layers) else None


def _check_layer(layer: object, width: int) -> None:
    if any("Quantized" in base.__name__ for base in type(layer).__mro__):
        raise PosEncError(
            "this position scheme keeps a number per token next to its key, which a quantized cache would round: use "
            "a DynamicCache or a StaticCache"
        )
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[-1] != width:
        raise PosEncError(
            f"this position scheme stores keys of width {width}, which include a number per head and token, but the "
            f"cache has keys of width {keys.shape[-1]}: it was filled by another model, in another dtype or by prefix "
            "tuning, or initialized early. Pass an empty cache, and do not call early_initialization"
        )
