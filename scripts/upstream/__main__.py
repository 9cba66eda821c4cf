"""Compare transformers' own tests of variants with those of stock models: `make test-upstream SUITE=checkout`.

Runs without deviations are recorded in benchmarks/upstream.json, and not repeated for the same release.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hf_posenc import list_schemes
from hf_posenc.model_types import MODEL_TYPES
from hf_posenc.patches import ARCHITECTURES

from .comparison import Deviation, Outcomes, deviations
from .record import add_to_record, is_done, summarize

INITIALIZER_RANGE, OTHER_RANGES = 0.3, (0.26, 0.28, 0.32, 0.34)
"""Of the random weights: in a full run, and in those that repeat tests that deviate in it."""
CAUSAL_ONLY = ("cope", "forget")
"""Schemes that count tokens from the query back to the key."""
LEFT_OUT = {
    "the Hub": r"Integration|LanguageGeneration|Mask4DTestHard|test_model_from_pretrained|test_batch_generation|"
    r"test_pipeline_",
    "other hardware or packages": r"flash_att|_fa[234]_|offload|model_parallel|deepspeed|device_context_manager|"
    r"global_device_set|kernels_can_load|quant_cache|_quantized|onnx_export|executorch",
    "several processes, or minutes": r"test_fsdp2_|test_tp_|test_static_cache_no_recompile|compilation_all_outputs|"
    r"training_overfit|bc_torch_dtype",
}
"""Tests that are not run, by what they need."""


def suites(checkout: Path) -> dict[str, Path]:
    """The test file of each supported model type that has one in a checkout of transformers."""
    files = {}
    for model_type in MODEL_TYPES:
        name = model_type.replace("-", "_")
        path = Path("tests", "models", name, f"test_modeling_{name}.py")
        if (checkout / path).is_file():
            files[model_type] = path
    return files


def run_suite(
    checkout: Path, file: Path, scheme: Any, results: Path, only: str, initializer_range: float = INITIALIZER_RANGE
) -> Outcomes:
    """Run the tests of one model type, and return what was recorded of each."""
    results.parent.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "POSENC_UPSTREAM_SCHEME": json.dumps(scheme),
        "POSENC_UPSTREAM_RESULTS": str(results.resolve()),
        "POSENC_UPSTREAM_INIT": str(initializer_range),
        "POSENC_UPSTREAM_ONLY": only,
        "POSENC_UPSTREAM_LEFT_OUT": "|".join(LEFT_OUT.values()),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "scripts.upstream.plugin", str(file)]
    log = results.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=checkout,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not results.is_file():
        raise SystemExit(f"No test was run: see {log}")
    outcomes = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {record["test"]: record for record in outcomes}


def parse_scheme(name: str) -> Any:
    """A scheme from its name, or from JSON."""
    return json.loads(name) if name.startswith(("{", "[")) else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="checkout of transformers, of about the installed release")
    parser.add_argument("--models", nargs="+", help="model types; all that have a suite by default")
    parser.add_argument(
        "--schemes", nargs="+", default=list(list_schemes()), help="scheme names, or JSON; default: all"
    )
    parser.add_argument("--only", default="", help="pattern of the tests to run; such runs are not recorded")
    parser.add_argument("--again", action="store_true", help="repeat recorded runs")
    parser.add_argument("--workers", type=int, default=1, help="suites to run at a time")
    parser.add_argument("--results", type=Path, default=Path("build/upstream"), help="where outcomes and logs go")
    arguments = parser.parse_args()
    files = suites(arguments.checkout)
    unknown = [name for name in arguments.models or () if name not in files]
    if unknown or not files:
        raise SystemExit(f"No suite for {', '.join(unknown) or 'any model type'} in {arguments.checkout}")
    repeat = arguments.again or bool(arguments.only)
    total = 0
    for model_type in arguments.models or files:
        possible = [name for name in arguments.schemes if applies(model_type, parse_scheme(name))]
        names = [name for name in possible if repeat or not is_done(model_type, name)]
        if names:
            total += compare(model_type, files[model_type], names, arguments)
    sys.exit(bool(total))


def applies(model_type: str, scheme: Any) -> bool:
    """Whether a scheme can be used on a model type: some are for causal models only."""
    architecture = ARCHITECTURES[model_type]
    is_encoder = not architecture.is_causal(architecture.config_class())
    return not (is_encoder and (scheme if isinstance(scheme, str) else dict(scheme)["type"]) in CAUSAL_ONLY)


def compare(model_type: str, file: Path, names: list[str], arguments: argparse.Namespace) -> int:
    """Run the suite of a model type on the stock model and with each scheme; the number of deviations."""
    where, total = arguments.results / model_type, 0

    def run(name: str | None) -> Outcomes:
        results = where / (re.sub(r"[^\w.-]+", "_", name or "stock") + ".jsonl")
        return run_suite(arguments.checkout, file, name and parse_scheme(name), results, arguments.only)

    with ThreadPoolExecutor(arguments.workers) as pool:
        running = {name: pool.submit(partial(run, name)) for name in (None, *names)}
        stock = running[None].result()
        print(f"{model_type}, stock: {dict(Counter(record['outcome'] for record in stock.values()))}", flush=True)
        for name in names:
            variant = running[name].result()
            scheme = parse_scheme(name)
            differences = deviations(stock, variant, scheme)
            confirmed = confirm(differences, arguments.checkout, file, scheme, where / "again.jsonl")
            total += len(confirmed)
            if not arguments.only:
                add_to_record(model_type, name, summarize(variant, len(confirmed), len(differences) - len(confirmed)))
            print(f"{model_type}, {name}: {len(confirmed)} deviations in {len(variant)} tests", flush=True)
            for difference in differences:
                kind, test, reason = difference
                unstable = "" if difference in confirmed else ", with these random weights only"
                print(f"  {kind}{unstable}: {test}  {' '.join(reason.split())[:200]}", flush=True)
    return total


def confirm(differences: list[Deviation], checkout: Path, file: Path, scheme: Any, results: Path) -> list[Deviation]:
    """The deviations that most other random weights show too.

    Some tests compare float16 results, or the tokens of two ways to generate. With weights as large as here, rounding
    alone makes them fail now and then, for stock models as well.
    """
    if not differences:
        return []
    only = "|".join(re.escape(difference.test) + "$" for difference in differences)
    seen: Counter[str] = Counter()
    for number in OTHER_RANGES:
        stock, variant = (run_suite(checkout, file, own, results, only, number) for own in (None, scheme))
        seen.update(test for _, test, _ in deviations(stock, variant, scheme))
    return [difference for difference in differences if 2 * seen[difference.test] >= len(OTHER_RANGES)]


if __name__ == "__main__":
    main()
