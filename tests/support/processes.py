"""Run a function in several processes that can talk to each other, as torchrun would."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers


def run_processes(target: Callable[..., None], *args: Any, count: int = 2) -> None:
    """Call `target(*args)` in processes whose environment is that of torchrun; fail if one of them does.

    Args:
        target: A function of a module. It may initialize a process group, and need not destroy it.
        *args: Its arguments.
        count: The number of processes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forked processes need not import anything; where there is a GPU, torch cannot fork.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    processes = [
        context.Process(target=_run, args=(rank, count, port, target, args), daemon=True) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=900)
        if process.exitcode != 0:  # the others wait for it
            for other in processes:
                other.kill()
            raise AssertionError(f"a process ended with {process.exitcode}; see its traceback")


def _run(rank: int, count: int, port: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    target(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
