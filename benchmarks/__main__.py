"""Measure speed and memory: `python -m benchmarks` (`make bench`), or a sample of it with `--quick`.

Prints tables of ratios and writes them as JSON. A complete run also writes benchmarks/RESULTS.md.
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
from .measure import Measurement, Run, time_interleaved

HERE = Path(__file__).parent
RESULTS, QUICK_RESULTS, PAGE = HERE / "results.json", HERE / "quick.json", HERE / "RESULTS.md"
DISTANCE_SCHEMES = ["alibi", "t5", "kerple", "sandwich"]
CONTENT_SCHEMES = ["tupe", "transformer_xl", "shaw (keys)", "shaw", "deberta"]
ATTENTION: dict[str, tuple[list[str], dict[str, Any]]] = {
    "causal, forward": (
        [*DISTANCE_SCHEMES, "alibi, eager"],
        {"causal": True, "batch": 1, "padded": False, "grad": False},
    ),
    "causal, left-padded batch of 4": (DISTANCE_SCHEMES, {"causal": True, "batch": 4, "padded": True, "grad": False}),
    "causal, training step": (
        ["alibi", "t5", "alibi, eager"],
        {"causal": True, "batch": 1, "padded": False, "grad": True},
    ),
    "causal, forward, forget": (["forget"], {"causal": True, "batch": 1, "padded": False, "grad": False}),
    "causal, training step, forget": (["forget"], {"causal": True, "batch": 1, "padded": False, "grad": True}),
    "bidirectional, forward": (
        [*CONTENT_SCHEMES, "deberta, eager"],
        {"causal": False, "batch": 1, "padded": False, "grad": False},
    ),
    "bidirectional, forward, batch of 4": (
        CONTENT_SCHEMES,
        {"causal": False, "batch": 4, "padded": False, "grad": False},
    ),
    "bidirectional, training step": (
        CONTENT_SCHEMES,
        {"causal": False, "batch": 1, "padded": False, "grad": True},
    ),
}
ROUNDS = {512: 9, 1024: 7, 2048: 5, 4096: 3}
MAX_LENGTH = 4096


@dataclasses.dataclass(frozen=True)
class Job:
    """The measurements of one group, setting and length."""

    group: str
    setting: str
    length: int
    measure: Callable[[], list[Measurement]]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.group, self.setting, self.length


def timing_job(group: str, setting: str, length: int, runs: Callable[[], dict[str, Run]], rounds: int) -> Job:
    return Job(group, setting, length, lambda: time_interleaved(group, setting, length, runs(), rounds))


def attention_jobs(lengths: list[int], settings: list[str]) -> Iterator[Job]:
    for setting in settings:
        for length in lengths:
            yield Job("attention", setting, length, functools.partial(_time_attention, setting, length))


def _time_attention(setting: str, length: int) -> list[Measurement]:
    names, options = ATTENTION[setting]
    names = [name for name in names if length < MAX_LENGTH or not name.endswith("eager")]
    with torch.set_grad_enabled(options["grad"]):
        runs = attention.runs(names, length, **options)
        return time_interleaved("attention", setting, length, runs, ROUNDS[length])


def model_jobs(
    group: str,
    builders: dict[str, models.Builder],
    lengths: list[int],
    train: bool = False,
    batch: int = 1,
    quadratic_below: int = MAX_LENGTH,
) -> Iterator[Job]:
    setting = ("training step" if train else "forward") + (f", batch of {batch}" if batch > 1 else "")
    for length in lengths:
        measured = _without_quadratic(builders, length, quadratic_below)
        runs = functools.partial(_model_runs, measured, length, train, batch)
        yield timing_job(group, setting, length, runs, 5 if length <= 1024 and not train else 3)


def _model_runs(builders: dict[str, models.Builder], length: int, train: bool, batch: int) -> dict[str, Run]:
    ids = torch.randint(3, models.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    make_run = models.training_step if train else models.forward
    runs: dict[str, Run] = {}
    for name, build in builders.items():
        torch.manual_seed(0)
        runs[name] = make_run(build(length), ids)
    return runs


def _without_quadratic(builders: dict[str, models.Builder], length: int, limit: int) -> dict[str, models.Builder]:
    """From `limit` on, leave out the models that materialize all attention weights."""
    quadratic = [name for name in builders if any(word in name for word in models.QUADRATIC)]
    return {name: build for name, build in builders.items() if length < limit or name not in quadratic}


def generation_jobs(new_tokens: int, rounds: int) -> Iterator[Job]:
    for family in decoding.FAMILIES:
        runs = functools.partial(decoding.generation_runs, family, new_tokens)
        yield timing_job("decoding", family, new_tokens, runs, rounds)


def cached_decoding_jobs(lengths: list[int]) -> Iterator[Job]:
    groups = {"GPT-2": models.DECODERS, "LLaMA": models.LLAMAS, "LLaMA with forget": models.FORGETTING}
    for family, builders in groups.items():
        cached = {name: build for name, build in builders.items() if "x-transformers" not in name}
        for length in lengths:
            measured = _without_quadratic(cached, length, MAX_LENGTH)
            runs = functools.partial(decoding.cached_runs, measured, length, 32)
            yield timing_job("decoding with n cached tokens", f"{family}, 32 new tokens", length, runs, 5)


def memory_jobs() -> Iterator[Job]:
    for length in (512, 1024, 2048, 4096, 8192):
        measure = functools.partial(memory.attention_only, length, DISTANCE_SCHEMES)
        yield Job("memory", memory.ATTENTION_SETTING, length, measure)
    for grad in (False, True):
        yield Job("memory", memory.layer_setting(grad), 1024, functools.partial(memory.one_layer, 1024, grad))
    groups = {"ENCODERS": models.ENCODERS, "DECODERS": models.DECODERS, "LLAMAS": models.LLAMAS}
    for group, builders in groups.items():
        for length in (512, 1024, 2048, 4096):
            names = list(_without_quadratic(builders, length, MAX_LENGTH))
            measure = functools.partial(memory.models, group, names, length)
            yield Job("memory", memory.model_setting(group), length, measure)
    for length in (4096, 8192, 16384):
        measure = functools.partial(memory.long_input, length, ["alibi", "t5"])
        yield Job("memory", memory.LONG_INPUT_SETTING, length, measure)


def all_jobs() -> Iterator[Job]:
    lengths = [512, 1024, 2048, 4096]
    yield Job("import", "fresh process", 0, lambda: [import_time.measure()])
    yield from attention_jobs(lengths, list(ATTENTION))
    yield from model_jobs("encoders", models.ENCODERS, lengths, quadratic_below=2048)
    yield from model_jobs("encoders", models.ENCODERS, [512], batch=4)
    yield from model_jobs("encoders", models.ENCODERS, lengths, train=True, quadratic_below=2048)
    yield from model_jobs("decoders", models.DECODERS, lengths)
    yield from model_jobs("decoders", models.DECODERS, lengths, train=True, quadratic_below=2048)
    yield from model_jobs("llamas", models.LLAMAS, lengths)
    yield from model_jobs("llamas", models.LLAMAS, lengths, train=True)
    yield from generation_jobs(512, 5)
    yield from cached_decoding_jobs(lengths)
    yield from memory_jobs()


def quick_jobs() -> Iterator[Job]:
    yield from attention_jobs([1024], ["causal, forward", "causal, training step", "bidirectional, forward"])
    decoders = ("GPT-2", "GPT-2 + alibi", "GPT-2 + t5", "BLOOM (alibi)")
    yield from model_jobs("decoders", {name: models.DECODERS[name] for name in decoders}, [1024])
    encoders = ("BERT", "BERT + deberta (v2)", "DebertaV2")
    yield from model_jobs("encoders", {name: models.ENCODERS[name] for name in encoders}, [512])
    yield from generation_jobs(64, 3)
    yield Job("memory", memory.ATTENTION_SETTING, 4096, lambda: memory.attention_only(4096, ["alibi"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run a sample in under three minutes")
    parser.add_argument("--json", type=Path, help="file for the results (default: benchmarks/results.json)")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP", help="measure this group again")
    parser.add_argument("--missing", action="store_true", help="measure only what the results do not contain yet")
    parser.add_argument("--report", action="store_true", help="measure nothing; write RESULTS.md from the results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    path = options.json or (QUICK_RESULTS if options.quick else RESULTS)
    if options.report:
        PAGE.write_text(report.render_page(json.loads(path.read_text())))
        return
    print(report.machine_line(report.machine()), flush=True)
    jobs = list(quick_jobs() if options.quick else all_jobs())
    order = [job.key for job in jobs]
    measurements: list[Measurement] = []
    if options.only or options.missing:
        saved = [Measurement(**result) for result in json.loads(path.read_text())["results"]]
        measurements = [measurement for measurement in saved if measurement.group not in options.only]
        measured = {(m.group, m.setting, m.length) for m in measurements}
        jobs = [job for job in jobs if job.key not in measured]
    if options.only or options.missing:
        print(f"{len(jobs)} tables to measure:", *("{}: {}, n = {}".format(*job.key) for job in jobs), sep="\n  ")
    run: dict[str, Any] = {}
    for job in jobs:
        measurements += (latest := job.measure())
        print("\r" + "\n".join(report.tables(latest)), flush=True)
        gc.collect()
        measurements.sort(key=lambda m: order.index((m.group, m.setting, m.length)))
        # Written after every job, so that an interrupted run can be completed with --missing.
        run = report.write_json(measurements, "make bench-quick" if options.quick else "make bench", path)
    print("\n".join(report.target_table(measurements, complete=not options.quick)))
    if run and not options.quick:
        PAGE.write_text(report.render_page(run))


if __name__ == "__main__":
    main()
