"""Data collators that choose positions: short rows teach a model the positions of long ones.

Each wraps another collator and replaces `position_ids`, which any model that takes them can be trained with.

Shape legend: B batch, N tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from ..attention import document_starts
from ..checkpoints import eval_mode
from ..errors import PosEncError, SequenceLengthError
from ..patches import base_models
from ..text_data import ATTENTION_MASK, INPUT_IDS, POSITION_IDS

PositionSampling = Literal["pose", "randomized", "shape"]
"""The values of `--positions`."""


class DataCollatorWithPositions:
    """Base of the collators that choose positions.

    The positions of a row depend on the seed, the epoch and the row's tokens only: not on the batch it is in, on data
    loader workers, or on where a run was interrupted. Padding is left alone. Rows without an attention mask get one, so
    that stock models do not take a jump for a new document.

    Args:
        target_length: Positions are below this.
        collator: Makes the batch; by default, `default_data_collator` of transformers.
        seed: Seed of the positions.
        first_position: What the model's `position_ids` call position 0: in RoBERTa, 2.
        packed: Accept rows of several documents, whose `position_ids` restart. Each document then gets positions of
            its own, and still starts below the end of the previous one. Variants of hf_posenc keep such documents
            apart; stock models would take every jump for a border.

    Raises:
        PosEncError: On construction, if a number is out of range. On a batch, if rows do not fit into the target
            length, are packed without `packed=True`, or have positions that jump already.
    """

    def __init__(
        self,
        target_length: int,
        collator: Callable[[list[Any]], Any] = default_data_collator,
        *,
        seed: int = 0,
        first_position: int = 0,
        packed: bool = False,
    ) -> None:
        if target_length < 1 or seed < 0:
            raise PosEncError(f"target_length must be at least 1 and seed at least 0, got {target_length} and {seed}")
        self.target_length, self.collator, self.seed = target_length, collator, seed
        self.first_position, self.packed, self.epoch = first_position, packed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose new positions for this epoch; see `PositionEpochCallback`."""
        self.epoch = epoch

    def sample(self, lengths: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
        """Choose ascending positions for the documents of one row.

        Args:
            lengths: The number of tokens of each document; usually one, the row.
            generator: Source of randomness.

        Returns:
            One array per document, of values from 0 to `target_length` - 1.
        """
        raise NotImplementedError

    def __call__(self, features: list[Any]) -> Any:
        """Make a batch, with positions."""
        batch = self.collator(features)
        input_ids, mask, given = batch.get(INPUT_IDS), batch.get(ATTENTION_MASK), batch.get(POSITION_IDS)
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or len(input_ids) != len(features):
            raise PosEncError("the wrapped collator must return input_ids as a tensor with one row per example")
        if mask is not None and mask.shape != input_ids.shape:
            raise PosEncError("the wrapped collator must return an attention_mask of the shape of input_ids")
        real_BN = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        documents_BN = torch.zeros_like(input_ids)
        if given is not None:
            documents_BN = self._documents(given, real_BN)
        positions = torch.full_like(input_ids, self.first_position)
        for row, feature in enumerate(features):
            real_N = real_BN[row]
            lengths = documents_BN[row, real_N].bincount().tolist()
            chosen = self._row_positions([length for length in lengths if length], self._generator(feature))
            positions[row, real_N] = torch.from_numpy(chosen).to(positions) + self.first_position
        batch[POSITION_IDS] = positions
        if mask is None and not documents_BN.any():
            batch[ATTENTION_MASK] = torch.ones_like(input_ids)
        return batch

    def _documents(self, given_BN: torch.Tensor, real_BN: torch.Tensor) -> torch.Tensor:
        """(B, N): the number of each token's document in its row."""
        given_BN = given_BN - self.first_position
        documents_BN = document_starts(given_BN, real_BN).cumsum(-1)
        if documents_BN.any() and not self.packed:
            raise PosEncError(
                "rows hold several documents (their position_ids restart), which only variants of hf_posenc keep apart "
                "at positions that jump: pass packed=True for a variant, or one document per row"
            )
        if not torch.equal(contiguous_positions(given_BN, real_BN)[real_BN], given_BN[real_BN]):
            raise PosEncError("position_ids of the rows jump already: leave them out, or count from 0 by one")
        return documents_BN

    def _generator(self, feature: object) -> np.random.Generator:
        """A generator that is seeded by a row's tokens, before padding and masking, and nothing else of the batch."""
        ids = feature[INPUT_IDS] if isinstance(feature, Mapping) else None
        if ids is None:
            raise PosEncError("examples must be dicts with input_ids")
        digest = hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=8).digest()
        return np.random.default_rng([self.seed, self.epoch, int.from_bytes(digest, "little")])

    def _row_positions(self, lengths: list[int], generator: np.random.Generator) -> np.ndarray:
        """The positions of a row's tokens, such that each document starts below the end of the previous one."""
        if lengths and max(lengths) > self.target_length:
            raise PosEncError(
                f"a document of {max(lengths)} tokens does not fit into target_length {self.target_length}: raise it, "
                "or shorten the rows"
            )
        documents = self.sample(lengths, generator) if lengths else []
        for previous, document in itertools.pairwise(documents):
            # Positions that drop, or are zero again, mark a new document.
            highest_start = max(int(previous[-1]) - 1, 0)
            document -= max(int(document[0]) - highest_start, 0)
        return np.concatenate(documents) if documents else np.zeros(0, dtype=np.int64)


class DataCollatorWithPoSE(DataCollatorWithPositions):
    """Positional skip-wise training (PoSE): a row is cut into chunks, and positions between them are skipped.

    Zhu et al. 2023, https://arxiv.org/abs/2309.10400. The first chunk starts at 0; the text itself stays contiguous.
    Over many rows, a model trained at length n sees every distance up to `target_length`.

    Args:
        target_length: Positions are below this.
        collator: Makes the batch; by default, `default_data_collator` of transformers.
        chunks: The number of chunks.
        **options: As for `DataCollatorWithPositions`: `seed`, `first_position` and `packed`.

    Example:
        >>> collator = DataCollatorWithPoSE(8192, DataCollatorForLanguageModeling(tokenizer, mlm=False))
        >>> Trainer(model, arguments, train_dataset=rows, data_collator=collator)
    """

    def __init__(
        self,
        target_length: int,
        collator: Callable[[list[Any]], Any] = default_data_collator,
        *,
        chunks: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(target_length, collator, **options)
        if chunks < 2:
            raise PosEncError(f"chunks must be at least 2, got {chunks}")
        self.chunks = chunks

    def sample(self, lengths: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
        documents = []
        for length in lengths:
            num_cuts = min(self.chunks, length) - 1
            cuts = np.sort(generator.permutation(length - 1)[:num_cuts]) + 1
            skipped, positions = 0, np.arange(length)
            for cut in cuts:
                more = int(generator.integers(self.target_length - length - skipped, endpoint=True))
                positions[cut:] += more
                skipped += more
            documents.append(positions)
        return documents


class DataCollatorWithRandomizedPositions(DataCollatorWithPositions):
    """Randomized positions: a row gets a sorted random subset of the positions below `target_length`.

    Ruoss et al. 2023, https://arxiv.org/abs/2305.16843. For arguments, see `DataCollatorWithPositions`.

    Example:
        >>> Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithRandomizedPositions(2048))
    """

    def sample(self, lengths: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
        return [np.sort(generator.choice(self.target_length, length, replace=False)) for length in lengths]


class DataCollatorWithSHAPE(DataCollatorWithPositions):
    """Shifted absolute positions (SHAPE): all positions of a row are shifted by one random offset.

    Kiyono et al. 2021, https://arxiv.org/abs/2109.05644. Only schemes that know absolute positions notice. For
    arguments, see `DataCollatorWithPositions`.

    Example:
        >>> Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithSHAPE(2048))
    """

    def sample(self, lengths: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
        offset = int(generator.integers(self.target_length - max(lengths), endpoint=True))
        return [np.arange(length) + offset for length in lengths]


POSITION_COLLATORS: dict[PositionSampling, type[DataCollatorWithPositions]] = {
    "pose": DataCollatorWithPoSE,
    "randomized": DataCollatorWithRandomizedPositions,
    "shape": DataCollatorWithSHAPE,
}


class PositionEpochCallback(TrainerCallback):
    """Tells a collator the epoch, so that a row that is used again gets other positions.

    Args:
        collator: The training collator.

    Example:
        >>> Trainer(model, arguments, data_collator=collator, callbacks=[PositionEpochCallback(collator)])
    """

    def __init__(self, collator: DataCollatorWithPositions) -> None:
        self.collator = collator

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.collator.set_epoch(int(state.epoch or 0))


@torch.no_grad()
def check_reads_positions(model: PreTrainedModel, collator: DataCollatorWithPositions) -> None:
    """Raise PosEncError if no scheme of a model reads positions, or `target_length` is too long for one of them."""
    schemes = [scheme for base in base_models(model) for scheme in base.position_scheme]
    if not any(scheme.reads_positions for scheme in schemes):
        names = ", ".join(scheme.name for scheme in schemes)
        raise PosEncError(f"--positions has no effect, because {names} does not read position_ids: leave it out")
    last = torch.tensor([[collator.first_position + collator.target_length - 1]], device=model.device)
    try:
        with eval_mode(model):
            model(input_ids=torch.zeros_like(last), position_ids=last, attention_mask=torch.ones_like(last))
    except SequenceLengthError as error:
        raise PosEncError(f"--target-length {collator.target_length} is too long for the model: {error}") from error


def contiguous_positions(position_ids_BN: torch.Tensor, real_BN: torch.Tensor | None = None) -> torch.Tensor:
    """Positions from 0 without jumps, for positions from 0 that restart with each document of a row; 0 at padding."""
    if real_BN is None:
        real_BN = torch.ones_like(position_ids_BN, dtype=torch.bool)
    starts_BN = document_starts(position_ids_BN, real_BN)
    counts_BN = real_BN.long().cumsum(-1)
    before_BN = torch.where(starts_BN, counts_BN - 1, 0).cummax(-1).values
    return ((counts_BN - 1 - before_BN) * real_BN).clamp(min=0)
