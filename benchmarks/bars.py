"""What the engine is meant to reach, and whether the figures of a run do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .measure import Measured


class Figures:
    """The results of a run, to be asked for by setting, length and name."""

    def __init__(self, results: list[Measured]) -> None:
        self._by_key = {(found.group, found.setting, found.length, found.name): found for found in results}

    def ratio(self, group: str, setting: str, length: int, name: str, to: str | None = None) -> float:
        """The ratio to the first of its setting, or to another one: above 1 is slower, or more."""
        own = self._by_key[group, setting, length, name].ratio
        return own if to is None else own / self._by_key[group, setting, length, to].ratio

    def value(self, group: str, setting: str, length: int, name: str) -> float:
        return self._by_key[group, setting, length, name].value


@dataclasses.dataclass(frozen=True)
class Bar:
    what: str
    limit: float
    at_most: bool
    found: Callable[[Figures], float]

    def judged(self, figures: Figures) -> tuple[float, bool] | None:
        """The figure, and whether the bar is met; None if the run has not measured it."""
        try:
            found = self.found(figures)
        except KeyError:
            return None
        return found, found <= self.limit if self.at_most else found >= self.limit


def _attention(setting: str, length: int, name: str) -> Callable[[Figures], float]:
    return lambda figures: figures.ratio("attention", setting, length, name)


def _faster(setting: str, length: int, theirs: str, ours: str, group: str = "encoders") -> Callable[[Figures], float]:
    return lambda figures: figures.ratio(group, setting, length, theirs, ours)


def _growth(name: str) -> Callable[[Figures], float]:
    """Of the memory of attention under a scheme, from 2,048 to 8,192 tokens: 4 is linear, 16 square."""

    def found(figures: Figures) -> float:
        setting = "attention alone, causal"
        short, long = (figures.value("memory", setting, n, name) for n in (2048, 8192))
        return long / short

    return found


def _tiny_growth(name: str) -> Callable[[Figures], float]:
    setting = "tiny GPT-2, forward"
    return lambda figures: figures.value("memory", setting, 16384, name) / figures.value("memory", setting, 4096, name)


def _memory_of_layer(setting: str, ours: str, theirs: str) -> Callable[[Figures], float]:
    return lambda figures: figures.value("memory", setting, 1024, ours) / figures.value("memory", setting, 1024, theirs)


def _bars() -> list[Bar]:
    causal, padded = "causal, no gradient", "causal, left-padded batch of 4"
    bars = []
    for name in ("alibi", "t5", "kerple", "sandwich"):
        bars.append(Bar(f"{name}: attention, {causal}, n=2048", 1.25, True, _attention(causal, 2048, name)))
        bars.append(Bar(f"{name}: attention, {padded}, n=2048", 1.4, True, _attention(padded, 2048, name)))
        bars.append(Bar(f"{name}: peak memory of attention, n=8192 to n=2048", 4.5, True, _growth(name)))
    for group, family in (("decoders", "GPT-2"), ("llamas", "LLaMA")):
        for name in ("rope", "alibi", "t5"):
            what = f"{family} + {name}"
            found = _faster("forward", 1024, what, family, group)
            bars.append(Bar(f"{what}: whole model, n=1024", 1.10, True, found))
    step = "causal, forward and backward"
    bars.append(Bar("alibi: attention, training step, n=1024", 1.4, True, _attention(step, 1024, "alibi")))
    bars.append(Bar("t5 (trained): attention, training step, n=1024", 2.0, True, _attention(step, 1024, "t5")))
    for setting in ("both ways, no gradient", "both ways, no gradient, batch of 4"):
        bars.append(Bar(f"tupe: attention, {setting}, n=1024", 1.6, True, _attention(setting, 1024, "tupe")))
    for ours, theirs in (("BERT + deberta (v2)", "DebertaV2"), ("BERT + deberta (v1)", "Deberta")):
        for setting, length, limit in (
            ("forward", 512, 1.6),
            ("forward, batch of 4", 512, 1.6),
            ("forward", 1024, 2.2),
            ("training step", 512, 1.3),
            ("training step", 1024, 1.3),
        ):
            what = f"{ours} faster than {theirs}: {setting}, n={length}"
            bars.append(Bar(what, limit, False, _faster(setting, length, theirs, ours)))
        for setting in ("one layer, forward", "one layer, training step"):
            what = f"{ours} to {theirs}: peak memory, {setting}, n=1024"
            bars.append(Bar(what, 0.5, True, _memory_of_layer(setting, ours, theirs)))
    xl = _faster("forward", 1024, "XLNet", "BERT + transformer_xl")
    bars.append(Bar("BERT + transformer_xl faster than XLNet: forward, n=1024", 1.8, False, xl))
    both = "both ways, no gradient"
    bars.append(Bar(f"shaw with values: attention, {both}, n=1024", 3.0, True, _attention(both, 1024, "shaw")))
    for family in ("GPT-2", "LLaMA"):
        for name in ("rope", "alibi", "t5"):
            what = f"{family} + {name}: tokens a second to stock, 512 new tokens"

            def speed(figures: Figures, family: str = family, name: str = name) -> float:
                return 1 / figures.ratio("decoding", family, 512, f"{family} + {name}")

            bars.append(Bar(what, 0.9, False, speed))
    for theirs in ("BLOOM (alibi)", "MPT (alibi)"):
        found = _faster("forward", 2048, theirs, "GPT-2 + alibi", "decoders")
        bars.append(Bar(f"GPT-2 + alibi faster than {theirs}: forward, n=2048", 1.8, False, found))
    for name in ("alibi", "t5"):
        bars.append(Bar(f"{name}: tiny model, peak memory, n=16384 to n=4096", 4.5, True, _tiny_growth(name)))
    bars.append(
        Bar(
            "import hf_posenc, milliseconds over torch and transformers",
            100,
            True,
            lambda figures: figures.value("import", "fresh process", 0, "then import hf_posenc"),
        )
    )
    return bars


BARS = _bars()
