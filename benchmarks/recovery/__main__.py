"""Run the missing trials in parallel and write RECOVERY.md; rerun the same command to resume.

Some schemes try every learning rate with one seed; then all schemes run with the best rate and three seeds. The most
informative trials run first, so an interrupted benchmark still has a page to show.
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

from . import report
from .results import best_learning_rate
from .tasks import TASKS, CheckpointMissing, Task
from .trial import METHODS, SHORTER, Outcome, Trial, run_trial, start_worker

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "RECOVERY.md"
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="run only these checkpoints")
    parser.add_argument("--scheme", action="append", help="run only these schemes")
    parser.add_argument("--method", action="append", choices=sorted(METHODS), help="run only these methods")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sweep-only", action="store_true", help="stop after the sweep of learning rates")
    parser.add_argument("--report", action="store_true", help="run nothing; write RECOVERY.md from the results")
    options = parser.parse_args()
    outcomes = read_outcomes()
    if not options.report:
        tasks = list(_available(options.task or list(TASKS)))
        main_methods = [method for method in report.MAIN_METHODS if method in (options.method or METHODS)]
        others = [method for method in options.method or METHODS if method not in main_methods]
        phases = [(sweep, main_methods, 1), (repeat, main_methods, 1), (sweep, others, 1)]
        if not options.sweep_only:
            phases += [(repeat, main_methods, len(SEEDS)), (repeat_swept, others, len(SEEDS))]
            phases += [(repeat, others, 1), (repeat, others, len(SEEDS))]
        for (make_trials, methods, seeds), task in itertools.product(phases, tasks):
            trials = make_trials(task, methods, outcomes, seeds)
            selected = [trial for trial in trials if not options.scheme or str(trial.scheme) in options.scheme]
            _run_missing(selected, outcomes, options.workers)
            report.write(outcomes, PAGE, HERE)
    report.write(outcomes, PAGE, HERE)


def _available(names: list[str]) -> Iterator[Task]:
    for name in names:
        try:
            TASKS[name].load()
        except CheckpointMissing as error:
            print(f"skipping {name}: {error}")
        else:
            yield TASKS[name]


def _methods(task: Task, methods: list[str]) -> list[str]:
    return [method for method in methods if task.methods is None or method in task.methods]


def sweep(task: Task, methods: list[str], outcomes: list[Outcome], seeds: int) -> Iterator[Trial]:
    """Every learning rate on the swept schemes."""
    for method, scheme in itertools.product(_methods(task, methods), task.swept_schemes):
        for learning_rate in task.learning_rates:
            yield Trial(task.name, scheme, method, learning_rate, SEEDS[0])


def repeat(task: Task, methods: list[str], outcomes: list[Outcome], seeds: int) -> Iterator[Trial]:
    """The best learning rate with several seeds."""
    for method, scheme in itertools.product(_methods(task, methods), task.schemes):
        learning_rate = best_learning_rate(task, outcomes, scheme, method)
        for seed in SEEDS[: 1 if method in SHORTER else min(seeds, task.seeds)]:
            yield Trial(task.name, scheme, method, learning_rate, seed)


def repeat_swept(task: Task, methods: list[str], outcomes: list[Outcome], seeds: int) -> Iterator[Trial]:
    return (trial for trial in repeat(task, methods, outcomes, seeds) if trial.scheme in task.swept_schemes)


def _run_missing(trials: list[Trial], outcomes: list[Outcome], workers: int) -> None:
    """Run the trials that have no outcome yet, and save each as soon as it is done."""
    finished = {_key(outcome.trial) for outcome in outcomes}
    missing = [trial for trial in trials if _key(trial) not in finished]
    for name in {trial.task for trial in missing}:
        TASKS[name].rows(), TASKS[name].measure()  # fill the cache before the workers start
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        running = [pool.submit(run_trial, trial) for trial in missing]
        for done in tqdm(as_completed(running), total=len(running), unit="run"):
            outcomes.append(done.result())
            write_outcomes(outcomes)


def _key(trial: Trial) -> str:
    return json.dumps(dataclasses.asdict(trial), sort_keys=True)


def read_outcomes() -> list[Outcome]:
    if not RESULTS.is_file():
        return []
    return [
        Outcome(Trial(**entry["trial"]), [tuple(point) for point in entry["curve"]])
        for entry in json.loads(RESULTS.read_text(encoding="utf-8"))
    ]


def write_outcomes(outcomes: list[Outcome]) -> None:
    entries = sorted(map(dataclasses.asdict, outcomes), key=lambda entry: json.dumps(entry["trial"]))
    temporary = RESULTS.with_suffix(".new")
    temporary.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")
    temporary.replace(RESULTS)


if __name__ == "__main__":
    main()
