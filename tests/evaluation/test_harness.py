"""lm-evaluation-harness on a saved variant, with a task of its own: as the README shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import evaluation as evaluating
from tests.support import tiny_models as tiny
from tests.support.evaluation import text_ids, words

ROOT = Path(__file__).parents[2]

TASK = """
task: posenc_words
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{target}}}}"
metric_list:
  - metric: acc
  - metric: perplexity
"""


def test_the_harness_runs_a_saved_variant(tmp_path: Path) -> None:
    """With `trust_remote_code=True`, and nothing imported by hand. 60 tokens are more than the stock model reads."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install hf_posenc[harness]")
    tasks, ids = tmp_path / "tasks", text_ids(600).view(10, 60)
    variant = evaluating.checkpoint(tmp_path / "variant", "gpt2", "alibi", framed=False)
    tasks.mkdir()
    lines = [json.dumps({"text": words(row[:-1]), "target": words(row[-1:])}) for row in ids]
    (tasks / "data.jsonl").write_text("\n".join(lines))
    (tasks / "posenc_words.yaml").write_text(TASK.format(data=tasks / "data.jsonl"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    wanted = f"pretrained={variant},trust_remote_code=True,max_length=96,dtype=float32"
    line = ["--model", "hf", "--model_args", wanted, "--tasks", "posenc_words", "--include_path", str(tasks)]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *line, "--device", "cpu", "--output_path", str(tmp_path / "out")],
        env={**environment, "HF_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    found = report["results"]["posenc_words"]["perplexity,none"]
    model = tiny.model("gpt2", "alibi", torch.float32)
    with torch.no_grad():
        losses = [-model(row[None, :-1]).logits[0, -1].log_softmax(-1)[row[-1]] for row in ids]
    assert found == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)  # float32
