"""Train tiny models with DeepSpeed ZeRO-3 in two processes on CPUs, and compare with one process."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny_models as tiny
from tests.support.processes import run_processes
from tests.support.sharded_runs import ZERO3

STEPS, LEARNING_RATE, PROCESSES = 3, 0.1, 2


def loss_differences(schemes: dict[str, Any], directory: Path) -> dict[str, float | str]:
    """The largest difference of the loss at some SGD steps of a LLaMA with each scheme, or the error."""
    file = directory / "differences.json"
    run_processes(_compare, schemes, file, count=PROCESSES)
    return json.loads(file.read_text())


def _compare(schemes: dict[str, Any], file: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    rank, results = int(os.environ["RANK"]), {}
    for name, scheme in schemes.items():
        model = tiny.model("llama", scheme, torch.float32).train()
        expected = _losses_of_one_process(copy.deepcopy(model))
        try:
            losses = _losses_with_zero3(model, rank)
            results[name] = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
        except Exception as error:
            results[name] = repr(error)
    if rank == 0:
        file.write_text(json.dumps(results))


def _batch(step: int) -> torch.Tensor:
    return tiny.tokens(2 * PROCESSES, 12, seed=step)


def _losses_of_one_process(model: Any) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), LEARNING_RATE), []
    for step in range(STEPS):
        loss = model(input_ids=_batch(step), labels=_batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _losses_with_zero3(model: Any, rank: int) -> list[float]:
    import deepspeed

    config = {"zero_optimization": ZERO3["zero_optimization"], "train_micro_batch_size_per_gpu": 2}
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        rows = _batch(step).chunk(PROCESSES)[rank]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / PROCESSES)
    assert all(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    return losses
