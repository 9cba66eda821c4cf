"""What the methods cost: the attention function over a whole input, and a new token after cached ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..decoding import cached_runs
from ..measure import Run
from ..models import llama
from .stories import METHODS

COST_LENGTH, COST_HEADS, COST_HEAD_SIZE, COST_ROUNDS = 4096, 4, 64, 9
DECODED_TOKENS, DECODING_ROUNDS, TRAINING_ROUNDS = 16, 5, 5
Ratios = dict[str, dict[str, float]]


@torch.no_grad()
def measure_cost() -> Ratios:
    """The CPU time of the attention function alone, on one thread, as a ratio to plain rotary attention."""
    return interleaved_ratios(_attention_runs(), COST_ROUNDS)


def measure_training_cost() -> Ratios:
    """The same for a forward and a backward pass."""

    def with_backward(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: run().sum().backward()

    runs = _attention_runs(requires_grad=True)
    return interleaved_ratios({name: with_backward(run) for name, run in runs.items()}, TRAINING_ROUNDS)


def _attention_runs(requires_grad: bool = False) -> dict[str, Callable[[], torch.Tensor]]:
    """The attention function of each method on random queries, keys and values."""
    shape = (1, COST_HEADS, COST_LENGTH, COST_HEAD_SIZE)
    states = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for state in states:
        state.requires_grad_(requires_grad)

    def attention(scheme: Any) -> Callable[[], torch.Tensor]:
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=COST_HEADS * COST_HEAD_SIZE,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=COST_HEADS,
            max_position_embeddings=COST_LENGTH // 4,
            attn_implementation="sdpa",
            position_scheme=scheme,
        )
        base = LlamaModel(config).eval()
        module: Any = base.layers[0].self_attn
        positions = base.prepare_inputs({"input_ids": torch.zeros(1, COST_LENGTH, dtype=torch.long)}).positions  # type: ignore[operator]
        attend, layer = ALL_ATTENTION_FUNCTIONS["hf_posenc"], module.layer_schemes(positions)
        return lambda: attend(module, *states, None, posenc=layer, scaling=COST_HEAD_SIZE**-0.5)[0]

    return {name: attention(scheme) for name, scheme in _timed_methods().items()}


def measure_decoding() -> Ratios:
    """The CPU time of a new token after cached ones, for a model of 4 layers, as a ratio to a stock LLaMA."""
    trained_length = COST_LENGTH // 4
    builders = {name: partial(_decoder, scheme, trained_length) for name, scheme in _timed_methods().items()}
    return interleaved_ratios(cached_runs(builders, COST_LENGTH, DECODED_TOKENS), DECODING_ROUNDS)


def _timed_methods() -> dict[str, Any]:
    """Plain attention, and the methods that do not only change angles."""
    return {name: scheme for name, scheme in METHODS.items() if "extend" in scheme or name == "plain"}


def _decoder(scheme: Any, trained_length: int, length: int) -> Any:
    return llama(trained_length, None if scheme == "rope" else scheme)


def interleaved_ratios(runs: dict[str, Run], rounds: int) -> Ratios:
    """The CPU time of each run on one thread, over that of the first in the same round: median and quartiles.

    Unlike elapsed time, CPU time hardly depends on how busy the machine is.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in runs if number % 2 else reversed(runs):  # no run always follows the same one
            start = time.process_time()
            runs[name]()
            times[name].append(time.process_time() - start)
    torch.set_num_threads(threads)
    first = times[next(iter(runs))]
    ratios = {name: [t / plain for t, plain in zip(times[name], first, strict=True)][1:] for name in runs}
    summaries = {name: statistics.quantiles(values, n=4) for name, values in ratios.items()}
    return {name: {"ratio": middle, "low": low, "high": high} for name, (low, middle, high) in summaries.items()}
