"""TrainingArguments that a run takes have an effect: on the weights, the log, or the checkpoints of a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.training import TrainRequest, train
from hf_posenc.training.recipes import NAIVE
from tests.support import word_level_tokenizer as word_level
from tests.support.training_runs import settings, weights

pytest.importorskip("datasets", reason="the extra `train` is not installed")
STEPS, ROWS = 4, 21


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    (directory / "text.txt").write_text(word_level.text(8 * ROWS))
    word_level.saved("gpt2", directory / "stock", n_layer=1, attn_pdrop=0.1)
    return directory


def run(source: Path, out: Path, **changes: Any) -> Path:
    evaluation = {"eval_data": str(source / "text.txt"), "self_eval_rows": 0} if "eval_strategy" in changes else {}
    request = TrainRequest(str(source / "stock"), str(source / "text.txt"), "8", "t5", recipe=NAIVE, **evaluation)
    return train(request, settings(out, **{"max_steps": STEPS, "lr_scheduler_type": "cosine", **changes}))


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("plain") / "out")


def same_weights(first: Path, second: Path) -> bool:
    others = weights(second)
    return all(torch.equal(weight, others[name]) for name, weight in weights(first).items())


def log(out: Path) -> list[dict[str, float]]:
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def checkpoints(out: Path) -> set[str]:
    return {path.name for path in out.glob("checkpoint-*")}


def test_the_same_arguments_give_the_same_weights(source: Path, plain: Path, tmp_path: Path) -> None:
    """The control of the next test."""
    assert same_weights(plain, run(source, tmp_path / "out"))


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1e-3},
        {"weight_decay": 0.5},
        {"adam_beta1": 0.5},
        {"adam_beta2": 0.5},
        {"adam_epsilon": 1e-2},
        {"max_grad_norm": 1e-3, "adam_epsilon": 1e-2},
        {"optim": "adafactor"},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"lr_scheduler_type": "linear"},
        {"lr_scheduler_kwargs": {"num_cycles": 2.0}},
        {"warmup_steps": 3},
        {"seed": 1},
        {"data_seed": 1},
        {"neftune_noise_alpha": 5.0},
        {"label_smoothing_factor": 0.2},
        {"per_device_train_batch_size": 2},
        {"gradient_accumulation_steps": 2},
        {"max_steps": 3},
        {"max_steps": -1, "num_train_epochs": 0.5},
        {"max_steps": 7, "dataloader_drop_last": True},
        {"bf16": True},
    ],
    ids=lambda changes: next(iter(changes)) if len(changes) == 1 else "-".join(changes),
)
def test_training(changes: dict[str, Any], source: Path, plain: Path, tmp_path: Path) -> None:
    """Compared with a run that differs in the last of the arguments, if there are several."""
    base = dict(list(changes.items())[1:]) if "max_grad_norm" in changes else dict(list(changes.items())[:-1])
    other = run(source, tmp_path / "base", **base) if base else plain
    assert not same_weights(other, run(source, tmp_path / "out", **changes))


def test_log(source: Path, plain: Path, tmp_path: Path) -> None:
    assert [entry["step"] for entry in log(plain)] == [1, 2, 3, 4]
    rarely = run(source, tmp_path / "rarely", logging_steps=3, save_steps=4, include_num_input_tokens_seen="all")
    assert [entry["step"] for entry in log(rarely)] == [3]
    assert log(rarely)[0]["num_input_tokens_seen"] > 0
    first = run(source, tmp_path / "first", logging_steps=3, save_steps=4, logging_first_step=True)
    assert [entry["step"] for entry in log(first)] == [1, 3]


def test_checkpoints(source: Path, plain: Path, tmp_path: Path) -> None:
    assert checkpoints(plain) == {"checkpoint-2", "checkpoint-4"}
    assert checkpoints(run(source, tmp_path / "every", save_steps=1)) == {f"checkpoint-{step}" for step in range(1, 5)}
    assert checkpoints(run(source, tmp_path / "one", save_steps=1, save_total_limit=1)) == {"checkpoint-4"}
    assert not checkpoints(run(source, tmp_path / "none", save_strategy="no"))


def test_evaluations(source: Path, tmp_path: Path) -> None:
    def evaluated(name: str, **changes: Any) -> list[float]:
        out = run(source, tmp_path / name, save_steps=4, eval_strategy="steps", **changes)
        return [entry["step"] for entry in log(out) if "eval_loss" in entry]

    assert evaluated("every", eval_steps=1) == [1, 2, 3, 4]
    assert evaluated("second", eval_steps=2) == [2, 4]
    assert evaluated("late", eval_steps=1, eval_delay=3) == [3, 4]
    assert evaluated("before", eval_steps=4, eval_on_start=True) == [0, 4]


def test_the_best_model(source: Path, tmp_path: Path) -> None:
    """With a learning rate that makes the model worse, the first checkpoint is the best."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 3.0, "max_grad_norm": 0.0}
    last = run(source, tmp_path / "last", **options)
    losses = [entry["eval_loss"] for entry in log(last) if "eval_loss" in entry]
    assert min(losses) < losses[-1]
    best = f"checkpoint-{1 + losses.index(min(losses))}"
    worst = f"checkpoint-{1 + losses.index(max(losses))}"

    def kept(name: str, **changes: Any) -> Path:
        return run(source, tmp_path / name, **options, load_best_model_at_end=True, **changes)

    assert same_weights(kept("best"), last / best)
    assert same_weights(kept("perplexity", metric_for_best_model="perplexity", greater_is_better=False), last / best)
    assert same_weights(kept("worst", metric_for_best_model="loss", greater_is_better=True), last / worst)
    saved = run(source, tmp_path / "saved", **options | {"save_strategy": "best", "metric_for_best_model": "loss"})
    assert best in checkpoints(saved)
    assert checkpoints(saved) < checkpoints(last)
