"""Run the trials that are missing, two at a time, and write the page.

Every learning rate with one seed on some schemes, then the best rate with three seeds on all of them. What says most
comes first, plain fine-tuning and the recommended recipe before the other methods: cut short, it has a page to show,
and goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tqdm.auto import tqdm

from . import report, worker
from .results import best_rate
from .subjects import SUBJECTS, Absent, Subject
from .trial import METHODS, SHORTER, Outcome, Trial

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "RECOVERY.md"
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--subject", action="append", choices=sorted(SUBJECTS), help="only these checkpoints")
    parser.add_argument("--scheme", action="append", help="only these schemes")
    parser.add_argument("--method", action="append", choices=sorted(METHODS), help="only these methods")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sweep-only", action="store_true", help="one seed, every learning rate")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from the results")
    options = parser.parse_args()
    outcomes = read()
    if not options.page_only:
        subjects = list(_present(options.subject or list(SUBJECTS)))
        first = [method for method in report.FIRST if method in (options.method or METHODS)]
        rest = [method for method in options.method or METHODS if method not in first]
        phases = [(sweep, first, 1), (repeated, first, 1), (sweep, rest, 1)]
        if not options.sweep_only:
            phases += [(repeated, first, len(SEEDS)), (repeated_where_swept, rest, len(SEEDS))]
            phases += [(repeated, rest, 1), (repeated, rest, len(SEEDS))]
        for (trials, methods, seeds), subject in itertools.product(phases, subjects):
            found = trials(subject, methods, outcomes, seeds)
            _run_all([trial for trial in found if _asked(trial, options.scheme)], outcomes, options.workers)
            report.write(outcomes, PAGE, HERE)
    report.write(outcomes, PAGE, HERE)


def _present(names: list[str]) -> Iterator[Subject]:
    for name in names:
        try:
            SUBJECTS[name].load()
        except Absent as reason:
            print(f"{name} is left out: {reason}")
        else:
            yield SUBJECTS[name]


def _asked(trial: Trial, schemes: list[str] | None) -> bool:
    return not schemes or str(trial.scheme) in schemes


def _tried(subject: Subject, methods: list[str]) -> list[str]:
    return [method for method in methods if subject.methods is None or method in subject.methods]


def sweep(subject: Subject, methods: list[str], outcomes: list[Outcome], seeds: int) -> Iterator[Trial]:
    """Every rate, on some schemes."""
    for method, scheme in itertools.product(_tried(subject, methods), subject.swept):
        for rate in subject.rates:
            yield Trial(subject.name, scheme, method, rate, SEEDS[0])


def repeated(subject: Subject, methods: list[str], outcomes: list[Outcome], seeds: int) -> Iterator[Trial]:
    """The best rate, with so many seeds."""
    for method, scheme in itertools.product(_tried(subject, methods), subject.schemes):
        rate = best_rate(subject, outcomes, scheme, method)
        for seed in SEEDS[: 1 if method in SHORTER else min(seeds, subject.seeds)]:
            yield Trial(subject.name, scheme, method, rate, seed)


def repeated_where_swept(subject: Subject, methods: list[str], outcomes: list[Outcome], seeds: int) -> Iterator[Trial]:
    return (trial for trial in repeated(subject, methods, outcomes, seeds) if trial.scheme in subject.swept)


def _run_all(trials: list[Trial], outcomes: list[Outcome], workers: int) -> None:
    """What is there already is not run again; each that is done is written at once."""
    known = {_key(outcome.trial) for outcome in outcomes}
    missing = [trial for trial in trials if _key(trial) not in known]
    for name in {trial.subject for trial in missing}:
        SUBJECTS[name].rows(), SUBJECTS[name].measure()  # what they keep is made once, before all
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=worker.start) as pool:
        running = [pool.submit(worker.run_one, trial) for trial in missing]
        for done in tqdm(as_completed(running), total=len(running), unit="run"):
            outcomes.append(done.result())
            write(outcomes)


def _key(trial: Trial) -> str:
    return json.dumps(dataclasses.asdict(trial), sort_keys=True)


def read() -> list[Outcome]:
    if not RESULTS.is_file():
        return []
    return [
        Outcome(Trial(**found["trial"]), [tuple(point) for point in found["curve"]])
        for found in json.loads(RESULTS.read_text(encoding="utf-8"))
    ]


def write(outcomes: list[Outcome]) -> None:
    listed = sorted((dataclasses.asdict(outcome) for outcome in outcomes), key=lambda found: json.dumps(found["trial"]))
    lines = [json.dumps(found) for found in listed]
    beside = RESULTS.with_suffix(".new")
    beside.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    beside.replace(RESULTS)


if __name__ == "__main__":
    main()
