"""Measure the engine: `python -m benchmarks` (`make bench`), or with `--quick` (`make bench-quick`) in three minutes.

Prints tables of ratios and writes JSON; the whole run also writes benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers.utils import logging

from . import attention, decoding, import_time, memory, models, report
from .measure import Measured, interleaved

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


def attention_alone(lengths: list[int], settings: list[str]) -> Iterator[list[Measured]]:
    for setting in settings:
        names, how = ATTENTION[setting]
        for length in lengths:
            own = [name for name in names if length < GREATEST or not name.endswith("eager")]
            if length == GREATEST and (how["batch"] == 4 or "both ways" in setting):
                continue
            with torch.set_grad_enabled(bool(how["grad"])):
                runs = attention.runs(own, length, **how)  # type: ignore[arg-type]
                yield interleaved("attention", setting, length, runs, ROUNDS[length])


def whole_models(
    group: str,
    builders: dict[str, Callable[[int], models.Model]],
    lengths: list[int],
    train: bool = False,
    batch: int = 1,
    square_below: int = GREATEST,
) -> Iterator[list[Measured]]:
    setting = ("training step" if train else "forward") + (f", batch of {batch}" if batch > 1 else "")
    for length in lengths:
        ids = torch.randint(3, models.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
        make = models.training_step if train else models.forward
        runs = {}
        for name, build in builders.items():
            if length < square_below or not any(word in name for word in models.QUADRATIC):
                torch.manual_seed(0)
                runs[name] = make(build(length), ids)
        yield interleaved(group, setting, length, runs, 5 if length <= 1024 and not train else 3)


def decoded(new_tokens: int, rounds: int) -> Iterator[list[Measured]]:
    for family in decoding.FAMILIES:
        yield interleaved("decoding", family, new_tokens, decoding.runs(family, new_tokens), rounds)


def memories() -> Iterator[list[Measured]]:
    for length in (2048, 8192):
        yield memory.attention_alone(length, BY_DISTANCE)
    for grad in (False, True):
        yield memory.one_layer(1024, grad)
    yield memory.long_inputs([4096, 8192, 16384], ["alibi", "t5"])


def encoders() -> Iterator[list[Measured]]:
    yield from whole_models("encoders", models.ENCODERS, [512, 1024, 2048, 4096], square_below=2048)
    yield from whole_models("encoders", models.ENCODERS, [512], batch=4)
    yield from whole_models("encoders", models.ENCODERS, [512, 1024], train=True)


def decoders() -> Iterator[list[Measured]]:
    yield from whole_models("decoders", models.DECODERS, [512, 1024, 2048, 4096])
    yield from whole_models("decoders", models.DECODERS, [512, 1024], train=True)


def llamas() -> Iterator[list[Measured]]:
    yield from whole_models("llamas", models.LLAMAS, [1024, 2048, 4096])
    yield from whole_models("llamas", models.LLAMAS, [1024], train=True)


GROUPS: dict[str, Callable[[], Iterator[list[Measured]]]] = {
    "import": lambda: iter([[import_time.measured()]]),
    "attention": lambda: attention_alone([512, 1024, 2048, 4096], list(ATTENTION)),
    "encoders": encoders,
    "decoders": decoders,
    "llamas": llamas,
    "decoding": lambda: decoded(512, 5),
    "memory": memories,
}
"""All that `make bench` measures, by the name that its results carry."""


def everything(only: list[str]) -> Iterator[list[Measured]]:
    for name, measure in GROUPS.items():
        if name in only or not only:
            yield from measure()


def quick() -> Iterator[list[Measured]]:
    yield from attention_alone(
        [1024], ["causal, no gradient", "causal, forward and backward", "both ways, no gradient"]
    )
    few = {name: models.DECODERS[name] for name in ("GPT-2", "GPT-2 + alibi", "GPT-2 + t5", "BLOOM (alibi)")}
    yield from whole_models("decoders", few, [1024])
    few = {name: models.ENCODERS[name] for name in ("BERT", "BERT + deberta (v2)", "DebertaV2")}
    yield from whole_models("encoders", few, [512])
    yield from decoded(64, 3)
    yield memory.attention_alone(4096, ["alibi"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample, in under three minutes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--only", action="append", choices=list(GROUPS), default=[], help="measure a group again; the rest stays"
    )
    parser.add_argument("--from-json", type=Path, help="measure nothing; write the page again from these figures")
    options = parser.parse_args()
    logging.set_verbosity_error()
    command = "make bench-quick" if options.quick else "make bench"
    json_path = options.json or HERE / ("quick.json" if options.quick else "results.json")
    if options.from_json:
        report.write_page(json.loads(options.from_json.read_text()), HERE / "RESULTS.md")
        return
    print(report.machine_line(report.machine()), flush=True)
    results: list[Measured] = []
    if options.only:
        earlier = [Measured(**found) for found in json.loads(json_path.read_text())["results"]]
        results = [found for found in earlier if found.group not in options.only]
    run = {}
    for found in quick() if options.quick else everything(options.only):
        print("\r" + "\n".join(report.table(found)), flush=True)
        results.extend(found)
        gc.collect()
        run = report.write_json(results, command, json_path)  # after each, so that a long run can be cut
    print("\n".join(report.bars(results, not options.quick)))
    if not options.quick:
        report.write_page(run, HERE / "RESULTS.md")


if __name__ == "__main__":
    main()
