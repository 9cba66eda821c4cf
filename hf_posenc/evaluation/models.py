"""The models under evaluation: loading them, and scoring tokens with them.

Shapes: B windows in a batch, N tokens in a window, E features, P scored tokens, V vocabulary entries.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from ..checkpoints import eval_mode, load_model, load_tokenizer, read_config
from ..errors import PosEncError, SequenceLengthError
from ..patches import ARCHITECTURES, find_architecture, find_auto_class
from .data import SpecialTokens, Windows
from .results import EvaluationStopped
from .settings import AUTO_CLASSES, EvaluationSettings, ProcessGroup

T = TypeVar("T")
ModelSource: TypeAlias = str | Path | PreTrainedModel
Models: TypeAlias = ModelSource | Sequence[ModelSource] | Mapping[str, ModelSource]
TOKENS_PER_CHUNK = 1024
"""Tokens whose logits are computed at once: those of a whole batch may not fit in memory."""
UNRELATED_FIELDS = ("_name_or_path", "transformers_version")
"""Fields of a config that do not change what the model computes."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model to evaluate: a checkpoint that is not loaded yet, or a live model."""

    name: str
    source: str | PreTrainedModel
    config: PreTrainedConfig
    revision: str | None
    task: str

    @contextlib.contextmanager
    def load(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        tokenize: Callable[[PreTrainedTokenizerBase | None], torch.Tensor],
        settings: EvaluationSettings,
        group: ProcessGroup,
    ) -> Iterator[EvaluatedModel]:
        """The model in eval mode. A live model stays on its device, and returns to its former mode afterwards."""
        tokenizer = tokenizer or self._load_tokenizer()
        token_ids = tokenize(tokenizer)
        if isinstance(self.source, str):
            model = self._load_model(self.source, settings.dtype).to(group.device)
        elif settings.dtype is None:
            model = self.source
        else:
            raise PosEncError("Live models are evaluated in their own dtype: remove dtype, or pass a checkpoint")
        largest, vocab_size = int(token_ids.max()), int(model.config.vocab_size)
        if largest >= vocab_size:
            raise PosEncError(
                f"The text contains token id {largest}, but {self.name} has a vocabulary of {vocab_size}: does the "
                "tokenizer belong to this model?"
            )
        with eval_mode(model):
            yield EvaluatedModel(self.name, model, tokenizer, self.task, token_ids, settings, group)

    def _load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        if isinstance(self.source, str):
            return load_tokenizer(self.source, self.revision)
        name = getattr(self.config, "name_or_path", "")
        try:
            return load_tokenizer(name, self.revision) if name else None
        except PosEncError:  # where a live model came from may be gone
            return None

    def _load_model(self, source: str, dtype: str | None) -> PreTrainedModel:
        auto_class = AUTO_CLASSES[self.task]
        try:
            model, missing = load_model(source, auto_class, self.revision, dtype=dtype or "auto")
        except PosEncError as error:
            raise PosEncError(f"Cannot evaluate {self.name} for the task {self.task}: {error}") from error
        if missing:  # they would be random, and so would the results
            raise PosEncError(
                f"{source} lacks weights for the task {self.task}, such as {missing[0]}: remove --task (task=), or use "
                "a checkpoint that has them"
            )
        return model


def list_candidates(models: Models, task: str | None, revision: str | None) -> list[Candidate]:
    """Name the models, read their configs, and infer the task from the head of each if none is given."""
    if not isinstance(models, Mapping):
        sources = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
        models = _choose_names(sources)
    if not models:
        raise PosEncError("Pass at least one model to evaluate")
    candidates = []
    for name, source in models.items():
        if isinstance(source, nn.Module):
            config, class_names = source.config, [cls.__name__ for cls in type(source).__mro__]
        else:
            config = read_config(source, revision)
            source, class_names = str(source), config.architectures or []
        candidates.append(Candidate(str(name), source, config, revision, task or _infer_task(class_names)))
    return candidates


def _infer_task(class_names: Iterable[str]) -> str:
    auto_class = find_auto_class(class_names) or "AutoModel"
    return next(task for task, name in AUTO_CLASSES.items() if name == auto_class)


def _choose_names(sources: Sequence[ModelSource]) -> dict[str, ModelSource]:
    """The last part of a path, or the whole path if those clash; the class name of a live model."""
    for short in (True, False):
        names = [
            type(source).__name__ if isinstance(source, nn.Module) else Path(source).name if short else str(source)
            for source in sources
        ]
        if len(set(names)) == len(names):
            return dict(zip(names, sources, strict=True))
    raise PosEncError(f"The models {names} need distinct names: pass a mapping (name=path on the command line)")


@contextlib.contextmanager
def stop_on_refusal() -> Iterator[None]:
    """Turn a refusal of the input's length and out-of-memory errors into EvaluationStopped; let all others pass."""
    try:
        yield
    except SequenceLengthError as error:
        raise EvaluationStopped(str(error), refused=True) from error
    except RuntimeError as error:  # torch.OutOfMemoryError on accelerators, a plain RuntimeError on CPU
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        summary = str(error).split(". ")[0]
        hint = "use fewer tokens per batch (--batch-tokens), bfloat16 or more devices"
        raise EvaluationStopped(f"Out of memory ({summary}): {hint}", permanent=False) from error


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A loaded model with its tokenizer, the evaluation text in its tokens, and how to evaluate it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    task: str
    token_ids: torch.Tensor
    settings: EvaluationSettings
    group: ProcessGroup

    @property
    def causal(self) -> bool:
        return self.task == "causal-lm"

    @functools.cached_property
    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}

    @functools.cached_property
    def special_tokens(self) -> SpecialTokens:
        return SpecialTokens.from_tokenizer(self.tokenizer, self.causal)

    def windows(self, length: int, stride: int | None = None) -> Windows:
        return Windows(self.token_ids, self.special_tokens, length, stride)

    def map_batches(
        self, compute: Callable[[list[int]], Iterable[T]], num_items: int, length: int, description: str
    ) -> list[T]:
        """The results of all items, each of `length` tokens, in every process."""
        batch_size = max(self.settings.batch_tokens // length, 1)
        description = f"{self.name}: {description} at {length:,} tokens"
        return self.group.map_batches(compute, num_items, batch_size, description)

    def fingerprint(self) -> str:
        """A hash of the config and of every weight: any edit makes it another model."""
        fields = {name: value for name, value in self.model.config.to_dict().items() if name not in UNRELATED_FIELDS}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def prepare_inputs(
        self, windows: Windows, indices: list[int], causal_targets_BN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, target ids and what to score, (B, N) each: the given tokens if causal, else masked ones."""
        targets_BN = windows.input_ids(indices)
        if self.causal:
            return targets_BN, targets_BN, causal_targets_BN
        if self.tokenizer is None or self.tokenizer.mask_token_id is None:
            raise PosEncError(f"{self.name} is a masked model but its tokenizer has no mask token: pass tokenizer=")
        maskable_BN = windows.text_mask() & ~torch.isin(targets_BN, torch.tensor(self.tokenizer.all_special_ids))
        masked_BN = torch.zeros_like(maskable_BN)
        for row, index in enumerate(indices):
            # Seeded by window: the same tokens are masked whatever the batches and processes.
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + index)
            positions = maskable_BN[row].nonzero()[:, 0]
            count = max(math.floor(self.settings.mlm_probability * len(positions)), 1)
            masked_BN[row, positions[torch.randperm(len(positions), generator=generator)[:count]]] = True
        # Training also keeps some of the masked tokens and replaces some at random, which would only add noise here.
        return targets_BN.masked_fill(masked_BN, self.tokenizer.mask_token_id), targets_BN, masked_BN

    def hidden_states(self, input_ids_BN: torch.Tensor) -> torch.Tensor:
        """The last hidden states, (B, N, E); EvaluationStopped if the model refuses this length."""
        return self.base_outputs(input_ids_BN).last_hidden_state

    @torch.no_grad()
    def base_outputs(self, input_ids_BN: torch.Tensor) -> ModelOutput:
        """The outputs of the model without its head; EvaluationStopped if the model refuses this length."""
        # Indexing past a stock position table kills the process on a GPU. Variants check by themselves.
        architecture = ARCHITECTURES.get(self.model.config.model_type)
        limit = None if architecture is None else architecture.shape(self.model.config).table_size
        if limit is not None and input_ids_BN.shape[1] > limit:
            raise EvaluationStopped(
                f"The position table of this stock {self.model.config.model_type} ends at {limit} tokens: use a "
                "position_scheme without that limit, such as rope, alibi or t5",
                refused=True,
            )
        with stop_on_refusal():
            return self.model.base_model(input_ids_BN.to(self.model.device), **self._no_cache)

    @torch.no_grad()
    def log_probs(self, input_ids_BN: torch.Tensor, scored_BN: torch.Tensor) -> Iterator[torch.Tensor]:
        """Log-probabilities over the vocabulary for the scored tokens in order, in chunks of (P, V)."""
        assert not (self.causal and scored_BN[:, 0].any()), "a causal model cannot score the first token"
        predicted_from_BN = scored_BN.roll(-1, 1) if self.causal else scored_BN
        outputs = self.base_outputs(input_ids_BN)
        states_PE = outputs.last_hidden_state[predicted_from_BN.to(self.model.device)]
        for chunk_PE in states_PE.split(TOKENS_PER_CHUNK):
            with stop_on_refusal():
                log_probs_PV = _head_logits(self.model, outputs, chunk_PE).float().log_softmax(-1)
            if log_probs_PV.isnan().any():
                raise EvaluationStopped(f"The model predicts NaN at {input_ids_BN.shape[1]} tokens")
            yield log_probs_PV

    def token_losses(
        self, input_ids_BN: torch.Tensor, targets_BN: torch.Tensor, scored_BN: torch.Tensor
    ) -> torch.Tensor:
        """Loss of each scored target in nats and 0 elsewhere, (B, N), in float64 on the CPU."""
        targets = targets_BN[scored_BN].to(self.model.device).split(TOKENS_PER_CHUNK)
        chunks = [
            -log_probs_PV.gather(-1, targets_P[:, None])[:, 0].double().cpu()
            for log_probs_PV, targets_P in zip(self.log_probs(input_ids_BN, scored_BN), targets, strict=True)
        ]
        losses_BN = torch.zeros(input_ids_BN.shape, dtype=torch.float64)
        losses_BN[scored_BN] = torch.cat(chunks)
        return losses_BN

    def max_length(self, refused_length: int) -> int | None:
        """The longest input that the model accepts, below a length that it refused; None if it accepts that now."""

        def refuses(length: int) -> bool:
            try:
                self.hidden_states(torch.ones(1, length, dtype=torch.long))
            except EvaluationStopped as error:
                return error.refused  # running out of memory is not a limit of the model
            return False

        longest = bisect_left(range(1, refused_length + 1), True, key=refuses)
        return None if longest == refused_length else longest


def _head_logits(model: PreTrainedModel, outputs: ModelOutput, states_PE: torch.Tensor) -> torch.Tensor:
    """The logits for some hidden states, (P, V).

    The model's own forward computes them, with given outputs in place of its base model, because heads do more than
    multiply: they normalize, scale or cap.
    """
    if model.get_output_embeddings() is None:
        raise PosEncError(
            f"{type(model).__name__} has no language modelling head: set --task (task=) to causal-lm or masked-lm"
        )
    outputs = copy.copy(outputs)
    outputs.last_hidden_state = states_PE[None]
    architecture = find_architecture(model.config)
    base_class = type(model.base_model) if architecture is None else architecture.base
    # OPT's heads call the decoder inside the base model.
    bases = {model.base_model, *(module for module in model.modules() if isinstance(module, base_class))}
    with contextlib.ExitStack() as patches:
        for base in bases:
            patches.enter_context(_forward_replaced(base, lambda *args, **kwargs: outputs))
        placeholder = torch.zeros(1, len(states_PE), dtype=torch.long, device=states_PE.device)
        head_outputs = model(placeholder)
    logits = head_outputs.prediction_logits if "prediction_logits" in head_outputs else head_outputs.logits
    return logits[0]


@contextlib.contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., ModelOutput]) -> Iterator[None]:
    before = vars(module).get("forward")  # hooks of device maps set one on the instance
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
