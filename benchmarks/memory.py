"""Peak memory, each in a fresh process: attention alone, one layer against DeBERTa's, and very long inputs."""

from __future__ import annotations

from .measure import Measured, peak_memory

ATTENTION = """
import torch
from transformers.utils import logging
logging.set_verbosity_error()
from benchmarks import attention
with torch.no_grad():
    runs = attention.runs({names}, 256, causal=True, batch=1, padded=False, grad=False)
    list(runs.values())[-1]()  # warm
    runs = attention.runs({names}, {length}, causal=True, batch=1, padded=False, grad=False)
def run():
    list(runs.values())[-1]()
"""
LAYER = """
import torch
from transformers.utils import logging
logging.set_verbosity_error()
from benchmarks import models
model = {build}
model({warm})[0].sum().backward() if {grad} else model({warm})
step = (models.training_step if {grad} else models.forward)(model, torch.zeros(1, {length}, dtype=torch.long))
def run():
    step()
"""
WHOLE = """
import torch
from transformers.utils import logging
logging.set_verbosity_error()
from benchmarks import models
model = models.{group}[{name!r}]({length})
models.forward(model, torch.zeros(1, 64, dtype=torch.long))()
step = models.forward(model, torch.zeros(1, {length}, dtype=torch.long))
def run():
    step()
"""
LONG = """
import torch
from transformers.utils import logging
logging.set_verbosity_error()
import hf_posenc
from transformers import GPT2Config, GPT2Model
sizes = dict(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions={length}, bos_token_id=1, eos_token_id=2)
model = GPT2Model(GPT2Config(**sizes, position_scheme={scheme!r})).eval()
ids = torch.zeros(1, {length}, dtype=torch.long)
with torch.no_grad():
    model(ids[:, :256], use_cache=False)
def run():
    with torch.no_grad():
        model(ids, use_cache=False)
"""
SAMPLES = 2
ALONE, TINY = "attention alone, causal", "tiny GPT-2, forward"


def least(code: str, samples: int = SAMPLES) -> float:
    """Of several processes: what else runs on the machine can only add."""
    return min(peak_memory(code) for _ in range(samples))


def _measured(group: str, setting: str, length: int, found: dict[str, float], samples: int = SAMPLES) -> list[Measured]:
    baseline = max(next(iter(found.values())), 0.1)
    return [
        Measured(
            group, setting, length, name, value, "MB", value / baseline, value / baseline, value / baseline, samples
        )
        for name, value in found.items()
    ]


def attention_alone(length: int, names: list[str]) -> list[Measured]:
    found = {"plain SDPA": least(ATTENTION.format(names=[], length=length))}
    for name in names:
        found[name] = least(ATTENTION.format(names=[name], length=length))
    return _measured("memory", ALONE, length, found)


def layer_setting(grad: bool) -> str:
    return f"one layer, {'training step' if grad else 'forward'}"


def one_layer(length: int, grad: bool) -> list[Measured]:
    builds = {
        "BERT": "models.bert({n}, layers=1)",
        "BERT + deberta (v2)": "models.bert({n}, models.DEBERTA_V2, layers=1)",
        "BERT + deberta (v1)": "models.bert({n}, models.DEBERTA_V1, layers=1)",
        "DebertaV2": "models.deberta_v2({n}, layers=1)",
        "Deberta": "models.deberta_v1({n}, layers=1)",
    }
    warm = "torch.zeros(1, 64, dtype=torch.long)"
    found = {
        name: least(LAYER.format(build=build.format(n=length), warm=warm, grad=grad, length=length))
        for name, build in builds.items()
    }
    return _measured("memory", layer_setting(grad), length, found)


def whole_models(group: str, names: list[str], length: int) -> list[Measured]:
    """Of the models of a group, by its name in `models`. One process each: there are many."""
    found = {name: peak_memory(WHOLE.format(group=group, name=name, length=length)) for name in names}
    return _measured("memory", whole_setting(group), length, found, samples=1)


def whole_setting(group: str) -> str:
    return f"{group.lower()}, forward"


def long_input(length: int, schemes: list[str]) -> list[Measured]:
    found = {name: least(LONG.format(length=length, scheme=name)) for name in ["none", *schemes]}
    return _measured("memory", TINY, length, found)
