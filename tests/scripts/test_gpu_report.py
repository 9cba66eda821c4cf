"""The report on GPU kernels: what is read from ptxas, and what the page says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts import make_gpu_report as report
from scripts.gpu_report_page import render_page
from tests.gpu_harness import assembler

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
ptxas info    : Function properties for kernel
    2080 bytes stack frame, 2140 bytes spill stores, 1990 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""
PTX = """\
	@%p3 red.global.add.f32 [%rd1], %r1;
	atom.global.gpu.acq_rel.add.f32 %r2, [%rd2], %r1;
	@!%p4 red.global.add.f32 [%rd3], %r1;
	ld.global.b32 %r3, [%rd4]; // no atom. here
"""
KERNEL = {"shared_memory": 65536, "registers": 168, "spilled": 0, "atomics": 0, "warps": 4, "stages": 3}
ROWS = [report.Row("a100", "llama-8b", "training", scheme) for scheme in ("alibi", "t5", "fire", "cope")]


def page(**rows: Any) -> str:
    results = {"versions": {"torch": "2.13"}, "rows": {row.key: rows[row.scheme] for row in ROWS if row.scheme in rows}}
    return render_page(results, ROWS, 512)


def test_the_log_of_ptxas_is_read() -> None:
    assembly = assembler.read_log(LOG, PTX, 1024, {"num_warps": 8, "num_stages": 2})
    assert assembly == assembler.Assembly(1024, registers=255, spilled=2140, atomics=3, warps=8, stages=2)


def test_a_log_without_numbers_is_not_read() -> None:
    with pytest.raises(ValueError, match="0 bytes gmem"):
        assembler.read_log("ptxas info    : 0 bytes gmem", PTX, 1024, {"num_warps": 8, "num_stages": 2})


def test_the_page_has_what_was_measured_and_what_was_not() -> None:
    text = page(alibi={"forward": KERNEL, "backward": {**KERNEL, "registers": 255, "spilled": 8}})
    assert "| alibi | forward | 64 | 168 | 0 | 0 | 4 | 3 |\n| alibi | backward | 64 | 255 | 8 |" in text
    assert "- a100, llama-8b, training, t5" in text
    assert "training, alibi\n" not in text.partition("## Not measured")[2]


def test_the_page_stresses_what_does_not_fit() -> None:
    text = page(t5={"forward": {**KERNEL, "spilled": 1024}}, fire={"forward": {**KERNEL, "shared_memory": 200 * 1024}})
    assert "| t5 | forward | 64 | 168 | **1024** |" in text
    assert "| fire | forward | **200** | 168 | 0 |" in text


def test_the_page_has_failures() -> None:
    assert "| cope | failed: OutOfResources: shared / registers |" in page(
        cope={"error": "OutOfResources: shared | registers"}
    )


def test_the_page_is_current() -> None:
    results = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    assert report.PAGE.read_text(encoding="utf-8") == render_page(results, list(report.all_rows()), report.LENGTH)
