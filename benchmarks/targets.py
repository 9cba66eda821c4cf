"""Performance targets, and whether the results of a run meet them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .measure import Measurement
from .memory import ATTENTION_SETTING, LONG_INPUT_SETTING


class Results:
    """The measurements of a run by group, setting, length and name."""

    def __init__(self, measurements: list[Measurement]) -> None:
        self._by_key = {(m.group, m.setting, m.length, m.name): m for m in measurements}

    def ratio(self, group: str, setting: str, length: int, name: str, to: str | None = None) -> float:
        """The ratio to the first candidate, or to the candidate `to`; above 1 is slower."""
        ratio = self._by_key[group, setting, length, name].ratio
        return ratio if to is None else ratio / self._by_key[group, setting, length, to].ratio

    def value(self, group: str, setting: str, length: int, name: str) -> float:
        return self._by_key[group, setting, length, name].value


Figure = Callable[[Results], float]


@dataclasses.dataclass(frozen=True)
class Target:
    description: str
    limit: float
    figure: Figure
    at_most: bool = True

    def check(self, results: Results) -> tuple[float, bool] | None:
        """The measured figure and whether it meets the target; None if the run did not measure it."""
        try:
            figure = self.figure(results)
        except KeyError:
            return None
        return figure, figure <= self.limit if self.at_most else figure >= self.limit


def _attention(setting: str, length: int, name: str) -> Figure:
    return lambda results: results.ratio("attention", setting, length, name)


def _speedup(setting: str, length: int, reference: str, ours: str, group: str = "encoders") -> Figure:
    return lambda results: results.ratio(group, setting, length, reference, ours)


def _decoding_speed(family: str, scheme: str) -> Figure:
    return lambda results: 1 / results.ratio("decoding", family, 512, f"{family} + {scheme}")


def _memory_growth(setting: str, name: str, short: int, long: int) -> Figure:
    """With four times the length, 4 is linear and 16 quadratic."""
    return lambda results: results.value("memory", setting, long, name) / results.value("memory", setting, short, name)


def _layer_memory(setting: str, ours: str, reference: str) -> Figure:
    return lambda results: (
        results.value("memory", setting, 1024, ours) / results.value("memory", setting, 1024, reference)
    )


def _attention_targets() -> Iterator[Target]:
    forward, padded, step = "causal, forward", "causal, left-padded batch of 4", "causal, training step"
    for name in ("alibi", "t5", "kerple", "sandwich"):
        yield Target(f"{name}: attention, {forward}, n=2048", 1.25, _attention(forward, 2048, name))
        yield Target(f"{name}: attention, {padded}, n=2048", 1.4, _attention(padded, 2048, name))
        growth = _memory_growth(ATTENTION_SETTING, name, 2048, 8192)
        yield Target(f"{name}: growth of peak memory of attention, n=2048 to n=8192", 4.5, growth)
    yield Target("alibi: attention, training step, n=1024", 1.4, _attention(step, 1024, "alibi"))
    yield Target("t5 (trained): attention, training step, n=1024", 2.0, _attention(step, 1024, "t5"))
    for setting in ("bidirectional, forward", "bidirectional, forward, batch of 4"):
        yield Target(f"tupe: attention, {setting}, n=1024", 1.6, _attention(setting, 1024, "tupe"))
    setting = "bidirectional, forward"
    yield Target(f"shaw with values: attention, {setting}, n=1024", 3.0, _attention(setting, 1024, "shaw"))


def _decoder_targets() -> Iterator[Target]:
    for group, family in (("decoders", "GPT-2"), ("llamas", "LLaMA")):
        for scheme in ("rope", "alibi", "t5"):
            name = f"{family} + {scheme}"
            yield Target(f"{name}: model, forward, n=1024", 1.10, _speedup("forward", 1024, name, family, group))
            speed = _decoding_speed(family, scheme)
            yield Target(f"{name}: tokens per second relative to stock, 512 new tokens", 0.9, speed, at_most=False)
    for reference in ("BLOOM (alibi)", "MPT (alibi)"):
        speedup = _speedup("forward", 2048, reference, "GPT-2 + alibi", "decoders")
        yield Target(f"GPT-2 + alibi: speedup over {reference}, forward, n=2048", 1.8, speedup, at_most=False)
    for name in ("alibi", "t5"):
        growth = _memory_growth(LONG_INPUT_SETTING, name, 4096, 16384)
        yield Target(f"{name}: growth of peak memory of a tiny GPT-2, n=4096 to n=16384", 4.5, growth)


def _encoder_targets() -> Iterator[Target]:
    for ours, reference in (("BERT + deberta (v2)", "DebertaV2"), ("BERT + deberta (v1)", "Deberta")):
        for setting, length, limit in (
            ("forward", 512, 1.6),
            ("forward, batch of 4", 512, 1.6),
            ("forward", 1024, 2.2),
            ("training step", 512, 1.3),
            ("training step", 1024, 1.3),
        ):
            speedup = _speedup(setting, length, reference, ours)
            yield Target(f"{ours}: speedup over {reference}, {setting}, n={length}", limit, speedup, at_most=False)
        for setting in ("one layer, forward", "one layer, training step"):
            memory = _layer_memory(setting, ours, reference)
            yield Target(f"{ours}: peak memory relative to {reference}, {setting}, n=1024", 0.5, memory)
    speedup = _speedup("forward", 1024, "XLNet", "BERT + transformer_xl")
    yield Target("BERT + transformer_xl: speedup over XLNet, forward, n=1024", 1.8, speedup, at_most=False)


def _import_time(results: Results) -> float:
    return results.value("import", "fresh process", 0, "import hf_posenc")


TARGETS = [
    *_attention_targets(),
    *_decoder_targets(),
    *_encoder_targets(),
    Target("import hf_posenc: milliseconds after torch and transformers", 100, _import_time),
]
