"""Measure the engine: `python -m benchmarks` (`make bench`), or with `--quick` (`make bench-quick`) in three minutes.

Prints tables of ratios and writes JSON; the whole run also writes benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from . import attention, decoding, import_time, memory, models, report
from .measure import Measured, Run, interleaved

HERE = Path(__file__).parent
BY_DISTANCE = ["alibi", "t5", "kerple", "sandwich"]
BY_CONTENT = ["tupe", "transformer_xl", "shaw (keys)", "shaw", "deberta"]
EAGER = ["alibi, eager"]
ATTENTION: dict[str, tuple[list[str], dict[str, object]]] = {
    "causal, no gradient": (
        [*BY_DISTANCE, *EAGER],
        {"causal": True, "batch": 1, "padded": False, "grad": False},
    ),
    "causal, left-padded batch of 4": (BY_DISTANCE, {"causal": True, "batch": 4, "padded": True, "grad": False}),
    "causal, forward and backward": (
        ["alibi", "t5", *EAGER],
        {"causal": True, "batch": 1, "padded": False, "grad": True},
    ),
    "both ways, no gradient": (
        [*BY_CONTENT, "deberta, eager"],
        {"causal": False, "batch": 1, "padded": False, "grad": False},
    ),
    "both ways, no gradient, batch of 4": (
        BY_CONTENT,
        {"causal": False, "batch": 4, "padded": False, "grad": False},
    ),
    "both ways, forward and backward": (
        BY_CONTENT,
        {"causal": False, "batch": 1, "padded": False, "grad": True},
    ),
}
ROUNDS = {512: 9, 1024: 7, 2048: 5, 4096: 3}
GREATEST = 4096


@dataclasses.dataclass(frozen=True)
class Job:
    """One table of the results, to be measured when it is its turn."""

    group: str
    setting: str
    length: int
    measure: Callable[[], list[Measured]]

    def is_in(self, results: list[Measured]) -> bool:
        own = (self.group, self.setting, self.length)
        return any((found.group, found.setting, found.length) == own for found in results)


def interleaved_job(group: str, setting: str, length: int, runs: Callable[[], dict[str, Run]], rounds: int) -> Job:
    return Job(group, setting, length, lambda: interleaved(group, setting, length, runs(), rounds))


def attention_alone(lengths: list[int], settings: list[str]) -> Iterator[Job]:
    for setting in settings:
        for length in lengths:
            yield Job("attention", setting, length, functools.partial(_attention, setting, length))


def _attention(setting: str, length: int) -> list[Measured]:
    names, how = ATTENTION[setting]
    own = [name for name in names if length < GREATEST or not name.endswith("eager")]
    with torch.set_grad_enabled(bool(how["grad"])):
        runs = attention.runs(own, length, **how)  # type: ignore[arg-type]
        return interleaved("attention", setting, length, runs, ROUNDS[length])


def whole_models(
    group: str,
    builders: dict[str, Callable[[int], models.Model]],
    lengths: list[int],
    train: bool = False,
    batch: int = 1,
    square_below: int = GREATEST,
) -> Iterator[Job]:
    setting = ("training step" if train else "forward") + (f", batch of {batch}" if batch > 1 else "")
    for length in lengths:
        own = _fitting(builders, length, square_below)
        runs = functools.partial(_model_runs, own, length, train, batch)
        yield interleaved_job(group, setting, length, runs, 5 if length <= 1024 and not train else 3)


def _model_runs(
    builders: dict[str, Callable[[int], models.Model]], length: int, train: bool, batch: int
) -> dict[str, Run]:
    ids = torch.randint(3, models.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    make = models.training_step if train else models.forward
    runs: dict[str, Run] = {}
    for name, build in builders.items():
        torch.manual_seed(0)
        runs[name] = make(build(length), ids)
    return runs


def decoded(new_tokens: int, rounds: int) -> Iterator[Job]:
    for family in decoding.FAMILIES:
        runs = functools.partial(decoding.runs, family, new_tokens)
        yield interleaved_job("decoding", family, new_tokens, runs, rounds)


def decoded_behind(lengths: list[int]) -> Iterator[Job]:
    for group, builders in (("GPT-2", models.DECODERS), ("LLaMA", models.LLAMAS)):
        cached = {name: build for name, build in builders.items() if "x-transformers" not in name}
        for length in lengths:
            own = _fitting(cached, length, GREATEST)
            runs = functools.partial(decoding.runs_behind, own, length, 32)
            yield interleaved_job("decoding behind n tokens", f"{group}, 32 new tokens", length, runs, 5)


def _fitting(builders: dict[str, models.Builder], length: int, square_below: int) -> dict[str, models.Builder]:
    """Without those that write out all weights, from a length on."""
    fits = [name for name in builders if length < square_below or not any(word in name for word in models.QUADRATIC)]
    return {name: builders[name] for name in fits}


def memories() -> Iterator[Job]:
    for length in (512, 1024, 2048, 4096, 8192):
        yield Job("memory", memory.ALONE, length, functools.partial(memory.attention_alone, length, BY_DISTANCE))
    for grad in (False, True):
        yield Job("memory", memory.layer_setting(grad), 1024, functools.partial(memory.one_layer, 1024, grad))
    groups = {"ENCODERS": models.ENCODERS, "DECODERS": models.DECODERS, "LLAMAS": models.LLAMAS}
    for group, builders in groups.items():
        for length in (512, 1024, 2048, 4096):
            names = list(_fitting(builders, length, GREATEST))
            measure = functools.partial(memory.whole_models, group, names, length)
            yield Job("memory", memory.whole_setting(group), length, measure)
    for length in (4096, 8192, 16384):
        yield Job("memory", memory.TINY, length, functools.partial(memory.long_input, length, ["alibi", "t5"]))


def everything() -> Iterator[Job]:
    yield Job("import", "fresh process", 0, lambda: [import_time.measured()])
    yield from attention_alone([512, 1024, 2048, 4096], list(ATTENTION))
    yield from whole_models("encoders", models.ENCODERS, [512, 1024, 2048, 4096], square_below=2048)
    yield from whole_models("encoders", models.ENCODERS, [512], batch=4)
    yield from whole_models("encoders", models.ENCODERS, [512, 1024, 2048, 4096], train=True, square_below=2048)
    yield from whole_models("decoders", models.DECODERS, [512, 1024, 2048, 4096])
    yield from whole_models("decoders", models.DECODERS, [512, 1024, 2048, 4096], train=True, square_below=2048)
    yield from whole_models("llamas", models.LLAMAS, [512, 1024, 2048, 4096])
    yield from whole_models("llamas", models.LLAMAS, [512, 1024, 2048, 4096], train=True)
    yield from decoded(512, 5)
    yield from decoded_behind([512, 1024, 2048, 4096])
    yield from memories()


def quick() -> Iterator[Job]:
    yield from attention_alone(
        [1024], ["causal, no gradient", "causal, forward and backward", "both ways, no gradient"]
    )
    few = {name: models.DECODERS[name] for name in ("GPT-2", "GPT-2 + alibi", "GPT-2 + t5", "BLOOM (alibi)")}
    yield from whole_models("decoders", few, [1024])
    few = {name: models.ENCODERS[name] for name in ("BERT", "BERT + deberta (v2)", "DebertaV2")}
    yield from whole_models("encoders", few, [512])
    yield from decoded(64, 3)
    yield Job("memory", memory.ALONE, 4096, lambda: memory.attention_alone(4096, ["alibi"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample, in under three minutes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP", help="measure a group again")
    parser.add_argument("--missing", action="store_true", help="measure only what the figures do not have yet")
    parser.add_argument("--from-json", type=Path, help="measure nothing; write the page again from these figures")
    options = parser.parse_args()
    logging.set_verbosity_error()
    command = "make bench-quick" if options.quick else "make bench"
    json_path = options.json or HERE / ("quick.json" if options.quick else "results.json")
    if options.from_json:
        report.write_page(json.loads(options.from_json.read_text()), HERE / "RESULTS.md")
        return
    print(report.machine_line(report.machine()), flush=True)
    jobs = list(quick() if options.quick else everything())
    results: list[Measured] = []
    if options.only or options.missing:
        earlier = [Measured(**found) for found in json.loads(json_path.read_text())["results"]]
        results = [found for found in earlier if found.group not in options.only]
        jobs = [job for job in jobs if not job.is_in(results)]
    order = [(job.group, job.setting, job.length) for job in (quick() if options.quick else everything())]
    run: dict[str, Any] = {}
    for job in [*jobs, None]:
        if job is not None:
            found = job.measure()
            print("\r" + "\n".join(report.table(found)), flush=True)
            results.extend(found)
            gc.collect()
        results.sort(key=lambda found: order.index((found.group, found.setting, found.length)))
        run = report.write_json(results, command, json_path)  # after each, so that a long run can be cut
    print("\n".join(report.bars(results, not options.quick)))
    if not options.quick:
        report.write_page(run, HERE / "RESULTS.md")


if __name__ == "__main__":
    main()
