"""How an evaluation runs: its settings, the lengths, and the processes of `accelerate launch` that share the work."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from ..errors import PosEncError, install_command
from ..patches import max_positions
from .results import EvaluationStopped

T = TypeVar("T")
DEFAULT_LENGTHS = ("0.5x", "1x", "2x", "4x")
MIN_LENGTH = 2
DTYPES = ("float32", "bfloat16", "float16")
AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "feature-extraction": "AutoModel",
}
"""The Auto class of each task."""
SHARED_SETTINGS = ("confidence", "seed", "dtype", "max_tokens", "task")
METRIC_SETTINGS = {
    "perplexity": ("stride", "mlm_probability", "position_bins"),
    "passkey": ("passkey_depths", "passkey_trials"),
    "order": ("shuffle_blocks", "mlm_probability"),
    "similarity": (),
}
"""Settings that change the value of each metric, besides `SHARED_SETTINGS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How to evaluate.

    Attributes:
        stride: Tokens between the starts of sliding windows; None for adjacent windows. Each token is scored once, in
            the first window that contains it.
        mlm_probability: Fraction of tokens that masked models predict.
        position_bins: Bins for perplexity by position within the window.
        passkey_depths: Where to hide the passkey: 0 is the start of the text, 1 its end.
        passkey_trials: Trials per length and depth.
        shuffle_blocks: Sizes of the blocks in which context tokens are shuffled; None shuffles the whole window.
        confidence: Confidence level of the intervals.
        seed: Seed for masking, passkeys and shuffling.
        max_tokens: Tokens to read from the start of the text, the same for all lengths and models.
        batch_tokens: Tokens per batch.
        dtype: "float32", "bfloat16" or "float16"; None keeps the dtype of the checkpoint.
        task: "causal-lm", "masked-lm" or "feature-extraction"; None infers it from the model's head.
    """

    stride: int | None = None
    mlm_probability: float = 0.15
    position_bins: int = 16
    passkey_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    passkey_trials: int = 10
    shuffle_blocks: tuple[int | None, ...] = (4, 16, None)
    confidence: float = 0.95
    seed: int = 0
    max_tokens: int = 131_072
    batch_tokens: int = 4096
    dtype: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name in ("position_bins", "passkey_trials", "max_tokens", "batch_tokens", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PosEncError(f"{name} must be at least 1, got {value}")
        for name in ("confidence", "mlm_probability"):
            if not 0 < getattr(self, name) < 1:
                raise PosEncError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not self.passkey_depths or not all(0 <= depth <= 1 for depth in self.passkey_depths):
            raise PosEncError(f"passkey_depths must be between 0 (start) and 1 (end), got {self.passkey_depths}")
        if not self.shuffle_blocks or any(size is not None and size < 2 for size in self.shuffle_blocks):
            raise PosEncError(
                f"shuffle_blocks must be at least 2 tokens, or None for whole windows, got {self.shuffle_blocks}"
            )
        for name, choices in (("dtype", DTYPES), ("task", tuple(AUTO_CLASSES))):
            if getattr(self, name) not in (None, *choices):
                raise PosEncError(f"Unknown {name} {getattr(self, name)!r}; expected one of {choices}")

    def for_metric(self, metric: str) -> dict[str, object]:
        """The settings that a metric depends on, as JSON values."""
        values = {name: getattr(self, name) for name in (*METRIC_SETTINGS[metric], *SHARED_SETTINGS)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def resolve_lengths(
    lengths: Sequence[int | str], configs: Mapping[str, PreTrainedConfig], trained_length: int | None = None
) -> tuple[tuple[int, ...], int | None]:
    """Convert lengths to tokens, sorted and without duplicates, and find out what "1x" stands for.

    That is the trained length if it is given, else the one that the models share, or None if they differ.
    """
    if trained_length is not None and trained_length < 1:
        raise PosEncError(f"trained_length must be at least 1, got {trained_length}")
    model_lengths = {
        name: max_positions(config) if hasattr(config, "max_position_embeddings") else None
        for name, config in configs.items()
    }
    if trained_length is None and len(set(model_lengths.values())) == 1:
        trained_length = next(iter(model_lengths.values()))
    resolved = set()
    for length in lengths:
        text = str(length).strip().lower()
        if text.endswith("x") and trained_length is None:
            summary = ", ".join(f"{name}: {model_length}" for name, model_length in model_lengths.items())
            raise PosEncError(
                f"The models have different trained lengths ({summary}): set the one that 1x stands for with "
                "--trained-length (trained_length=)"
            )
        try:
            if trained_length is not None and text.endswith("x"):
                resolved.add(round(float(text[:-1]) * trained_length))
            else:
                resolved.add(int(text))
        except (ValueError, OverflowError):
            raise PosEncError(
                f"Invalid length {length!r}: expected tokens (512) or a multiple of the trained length (0.5x, 16x)"
            ) from None
    if not resolved or min(resolved) < MIN_LENGTH:
        raise PosEncError(
            f"lengths must have at least one length, and none below {MIN_LENGTH} tokens; got {sorted(resolved)}"
        )
    return tuple(sorted(resolved)), trained_length


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """This process among those that share the evaluation; without `accelerate launch`, the only one."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    progress: bool = True

    @classmethod
    def initialize(cls, device: str | None, progress: bool) -> ProcessGroup:
        """Join the other processes, if there are any, and choose the device."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
            try:
                return cls(torch.empty(1, device=device or best).device, progress=progress)
            except (RuntimeError, AssertionError) as error:  # torch raises either for devices it was not built for
                raise PosEncError(f"Cannot use device {device!r}: {error}") from error
        if device is not None:
            raise PosEncError("device cannot be set when there are several processes: accelerate assigns the devices")
        try:
            from accelerate import PartialState
            from accelerate.utils import parse_flag_from_env
        except ImportError:
            raise PosEncError(f"Several processes require accelerate: {install_command('train')}") from None
        # Without a GPU, PartialState only joins the processes when told to use the CPU.
        state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
        if state.num_processes == 1:
            raise PosEncError(f"accelerate did not connect the {world_size} processes: each would evaluate everything")
        return cls(state.device, state.process_index, state.num_processes, progress and state.is_main_process)

    def broadcast(self, value: T) -> T:
        """The main process's value, in every process."""
        values = [value]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(values, 0)
        return values[0]

    def map_batches(
        self, compute: Callable[[list[int]], Iterable[T]], num_items: int, batch_size: int, description: str
    ) -> list[T]:
        """The results of all items, in every process. If any process stops, all of them raise EvaluationStopped."""
        stopped: EvaluationStopped | None = None
        results: list[tuple[int, T]] = []
        indices = range(self.rank, num_items, self.world_size)
        try:
            with tqdm(total=len(indices), desc=description, leave=False, disable=not self.progress) as bar:
                for start in range(0, len(indices), batch_size):
                    batch = list(indices[start : start + batch_size])
                    results += zip(batch, compute(batch), strict=True)
                    bar.update(len(batch))
        except EvaluationStopped as error:
            stopped = error
        if self.world_size > 1:
            gathered: list[tuple[EvaluationStopped | None, list[tuple[int, T]]]] = [(None, [])] * self.world_size
            torch.distributed.all_gather_object(gathered, (stopped, results))
            stopped = next((error for error, _ in gathered if error is not None), None)
            results = [item for _, items in gathered for item in items]
        if stopped is not None:
            raise stopped
        return [result for _, result in sorted(results, key=lambda item: item[0])]
