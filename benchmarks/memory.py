"""Peak memory, each in a fresh process: attention only, one layer compared with DeBERTa's, and very long inputs."""

from __future__ import annotations

from .measure import Measurement, peak_memory

ATTENTION_SCRIPT = """
import torch
from transformers.utils import logging
logging.set_verbosity_error()
from benchmarks import attention
with torch.no_grad():
    runs = attention.runs({names}, 256, causal=True, batch=1, padded=False, grad=False)
    list(runs.values())[-1]()  # warm up
    runs = attention.runs({names}, {length}, causal=True, batch=1, padded=False, grad=False)
def run():
    list(runs.values())[-1]()
"""
LAYER_SCRIPT = """
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
MODEL_SCRIPT = """
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
LONG_INPUT_SCRIPT = """
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
ATTENTION_SETTING, LONG_INPUT_SETTING = "attention only, causal", "tiny GPT-2, forward"


def attention_only(length: int, schemes: list[str]) -> list[Measurement]:
    """Measure attention under each scheme against plain SDPA."""
    peaks = {"plain SDPA": _lowest_peak(ATTENTION_SCRIPT.format(names=[], length=length))}
    for name in schemes:
        peaks[name] = _lowest_peak(ATTENTION_SCRIPT.format(names=[name], length=length))
    return _measurements(ATTENTION_SETTING, length, peaks)


def layer_setting(grad: bool) -> str:
    return f"one layer, {'training step' if grad else 'forward'}"


def one_layer(length: int, grad: bool) -> list[Measurement]:
    """Measure one layer of BERT, of its deberta variants, and of stock DeBERTa."""
    builds = {
        "BERT": "models.bert({n}, layers=1)",
        "BERT + deberta (v2)": "models.bert({n}, models.DEBERTA_V2, layers=1)",
        "BERT + deberta (v1)": "models.bert({n}, models.DEBERTA_V1, layers=1)",
        "DebertaV2": "models.deberta_v2({n}, layers=1)",
        "Deberta": "models.deberta_v1({n}, layers=1)",
    }
    warm = "torch.zeros(1, 64, dtype=torch.long)"
    peaks = {
        name: _lowest_peak(LAYER_SCRIPT.format(build=build.format(n=length), warm=warm, grad=grad, length=length))
        for name, build in builds.items()
    }
    return _measurements(layer_setting(grad), length, peaks)


def model_setting(group: str) -> str:
    return f"{group.lower()}, forward"


def models(group: str, names: list[str], length: int) -> list[Measurement]:
    """Measure models of one of the groups in benchmarks.models, with one process per model."""
    peaks = {name: peak_memory(MODEL_SCRIPT.format(group=group, name=name, length=length)) for name in names}
    return _measurements(model_setting(group), length, peaks, samples=1)


def long_input(length: int, schemes: list[str]) -> list[Measurement]:
    """Measure a tiny GPT-2 on a very long input."""
    peaks = {name: _lowest_peak(LONG_INPUT_SCRIPT.format(length=length, scheme=name)) for name in ["none", *schemes]}
    return _measurements(LONG_INPUT_SETTING, length, peaks)


def _lowest_peak(code: str) -> float:
    """The minimum over several processes: other load on the machine can only add."""
    return min(peak_memory(code) for _ in range(SAMPLES))


def _measurements(setting: str, length: int, peaks: dict[str, float], samples: int = SAMPLES) -> list[Measurement]:
    baseline = max(next(iter(peaks.values())), 0.1)
    measurements = []
    for name, peak in peaks.items():
        ratio = peak / baseline
        measurements.append(Measurement("memory", setting, length, name, peak, "MB", ratio, ratio, ratio, samples))
    return measurements
