"""Run what is missing in results.json, and write RECOVERY.md from whatever is there; rerun to resume.

    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.recovery --list
    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.recovery --only stories260k/t5 --budget-minutes 30

The most informative runs come first: the recipe, then plain fine-tuning in all batch sizes and rates, then further
seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from tqdm.auto import tqdm

from . import report
from .plan import PHASES, current, estimate, is_selected, planned
from .real_llm import run_command
from .results import read_outcomes, write_outcomes
from .subjects import SUBJECTS, Subject
from .tasks import CheckpointMissing
from .trial import Outcome, Trial, run_trial, start_worker

HERE = Path(__file__).parent
PAGE = HERE.parent / "RECOVERY.md"
ORDER = [(phase, name) for phase in PHASES for name, subject in SUBJECTS.items() if subject.rows is not None]
ORDER += [(phase, name) for phase in PHASES for name, subject in SUBJECTS.items() if subject.rows is None]
"""Subjects that take hours come last."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", metavar="SUBJECT[/SCHEME]", help="run only these; may be repeated")
    parser.add_argument("--phase", action="append", choices=PHASES, help="run only these; may be repeated")
    parser.add_argument("--max-tokens", type=int, help="leave out runs with more unique tokens")
    parser.add_argument("--budget-minutes", type=float, help="start no run that would end later than this")
    parser.add_argument("--workers", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--list", action="store_true", help="show what would be run, and stop")
    parser.add_argument("--report", action="store_true", help="run nothing; write RECOVERY.md")
    options = parser.parse_args(arguments)
    unknown = {only.partition("/")[0] for only in options.only or []} - SUBJECTS.keys()
    if unknown:
        parser.error(f"unknown subject {', '.join(sorted(unknown))}; expected one of {', '.join(SUBJECTS)}")
    outcomes = read_outcomes()
    if not options.report:
        _print_plan(options, outcomes)
        if options.list:
            return
        deadline = float("inf") if options.budget_minutes is None else time.monotonic() + 60 * options.budget_minutes
        for phase, name in ORDER:
            _run_phase(options, SUBJECTS[name], phase, outcomes, deadline)
    report.write(outcomes, PAGE, HERE)


def _missing(options: argparse.Namespace, subject: Subject, phase: str, outcomes: list[Outcome]) -> list[Trial]:
    finished = {outcome.trial.key for outcome in current(outcomes, subject)}
    return [
        trial
        for trial in planned(subject, phase, outcomes)
        if is_selected(trial, options.only)
        and phase in (options.phase or PHASES)
        and trial.tokens <= (options.max_tokens or trial.tokens)
        and trial.key not in finished
    ]


def _print_plan(options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """How many runs each phase has, and how long they take. Estimates become exact once some runs are done."""
    total = 0.0
    for phase, name in ORDER:
        subject = SUBJECTS[name]
        trials = _missing(options, subject, phase, outcomes)
        workers = options.workers if subject.rows is not None else 1
        minutes = sum(estimate(subject, trial, outcomes) for trial in trials) / workers / 60
        total += minutes
        if trials:
            print(f"{name:<15}{phase:<14}{len(trials):>4} runs  about {minutes:6.1f} minutes")
    print(f"About {total:.0f} minutes on {options.workers} idle cores, besides runs that depend on a sweep to come.")


def _run_phase(
    options: argparse.Namespace, subject: Subject, phase: str, outcomes: list[Outcome], deadline: float
) -> None:
    trials = _missing(options, subject, phase, outcomes)
    if not trials:
        return
    try:
        subject.load()
        if subject.rows is not None:
            subject.rows(), [make() for make in subject.measures.values()]  # fill the cache before the workers start
    except CheckpointMissing as error:
        print(f"skipping {subject.name}: {error}")
        return
    if subject.rows is None:
        for trial in tqdm(trials, desc=f"{subject.name}: {phase}", unit="run"):
            if time.monotonic() + estimate(subject, trial, outcomes) <= deadline:
                _keep(run_command(trial, subject), outcomes)
    else:
        _run_in_pool(trials, subject, f"{subject.name}: {phase}", outcomes, options.workers, deadline)
    report.write(outcomes, PAGE, HERE)


def _run_in_pool(
    trials: list[Trial], subject: Subject, label: str, outcomes: list[Outcome], workers: int, deadline: float
) -> None:
    """Run trials in processes, as long as they end before the deadline, and save each as soon as it is done."""
    context, waiting, running = multiprocessing.get_context("spawn"), list(trials), set[Future[Outcome]]()
    with (
        ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool,
        tqdm(total=len(trials), desc=label, unit="run") as progress,
    ):
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.pop(0)
                if time.monotonic() + estimate(subject, trial, outcomes) <= deadline:
                    running.add(pool.submit(run_trial, trial))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                _keep(future.result(), outcomes)
                progress.update()


def _keep(outcome: Outcome, outcomes: list[Outcome]) -> None:
    outcomes[:] = [other for other in outcomes if other.trial.key != outcome.trial.key]
    outcomes.append(outcome)
    write_outcomes(outcomes)


if __name__ == "__main__":
    main()
