"""lm-evaluation-harness runs a saved variant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import tiny_models as tiny
from tests.support.evaluation import random_ids, save_checkpoint, to_text

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


@pytest.mark.slow
def test_lm_eval_runs_a_saved_variant(tmp_path: Path) -> None:
    """Needs only `trust_remote_code=True`. The 60 tokens are more than the stock model accepts."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: it is in the extra harness")
    tasks, ids = tmp_path / "tasks", random_ids(600).view(10, 60)
    variant = save_checkpoint(tmp_path / "variant", "gpt2", "alibi", add_special_tokens=False)
    tasks.mkdir()
    lines = [json.dumps({"text": to_text(row[:-1]), "target": to_text(row[-1:])}) for row in ids]
    (tasks / "data.jsonl").write_text("\n".join(lines))
    (tasks / "posenc_words.yaml").write_text(TASK.format(data=tasks / "data.jsonl"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    model_args = f"pretrained={variant},trust_remote_code=True,max_length=96,dtype=float32"
    options = ["--model", "hf", "--model_args", model_args, "--tasks", "posenc_words", "--include_path", str(tasks)]
    process = subprocess.run(
        [sys.executable, "-m", "lm_eval", *options, "--device", "cpu", "--output_path", str(tmp_path / "out")],
        env={**environment, "HF_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    perplexity = results["results"]["posenc_words"]["perplexity,none"]
    model = tiny.model("gpt2", "alibi", torch.float32)
    with torch.no_grad():
        losses = [-model(row[None, :-1]).logits[0, -1].log_softmax(-1)[row[-1]] for row in ids]
    assert perplexity == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)  # float32
