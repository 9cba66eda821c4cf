"""The subjects of the benchmark: a checkpoint to convert, and what to run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hf_posenc.training import generate_text

from .tasks import (
    CHAR_LENGTH,
    CHAR_ROWS,
    DIGITS,
    MORE_STORY_ROWS,
    SENTENCE_LENGTH,
    STORY_LENGTH,
    Batch,
    Measure,
    cached,
    generated_stories,
    load_char_model,
    load_minilm,
    load_sorter,
    load_stories,
    perplexity_increase,
    sentence_rows,
    sentence_shortfall,
    shakespeare,
    smollm2_directory,
    sorting_rows,
    sorting_shortfall,
    story_rows,
    written_stories,
)

SCHEMES: tuple[Any, ...] = (
    "sinusoidal",
    "polynomial",
    "exponential",
    "rope",
    "xpos",
    "alibi",
    "t5",
    "kerple",
    "fire",
    "sandwich",
    "cope",
    "shaw",
    "transformer_xl",
    "deberta",
    "tupe",
)
T5_PER_LAYER: dict[str, Any] = {"type": "t5", "shared": False}
NONE_IN_SOME_LAYERS: dict[str, Any] = {"type": "none", "layers": "3::4"}
ALIBI_PER_LAYER: dict[str, Any] = {"type": "alibi", "learned": "per_layer"}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checkpoint, its training rows, a metric, and what to run.

    Attributes:
        about: What the model is, and what its shortfall means.
        length: Tokens per row.
        hidden_size: The model's width, which sets the default learning rate.
        schemes: Each new scheme with the budgets of the recipe, in unique tokens.
        swept_schemes: Schemes that try every batch size, rate and number of passes; the others use what did best on
            these.
        naive_budgets: Budgets of plain fine-tuning. The recipe is compared with the last.
        naive_batches: Rows per step that plain fine-tuning tries.
        naive_rates: Learning rates that it tries.
        seconds_per_row: Estimated time of the recipe on one idle core, to which `seconds_per_step` is added; plain
            fine-tuning takes about half.
        texts: Where the shortfall is measured. The first text decides what is best and which targets are met.
        load: Loads the original, or raises `CheckpointMissing`.
        rows: The training rows; None if the subject runs `hf-posenc train` as a command.
        measures: For each text, makes the function that computes the shortfall.
        has_head: Whether the model predicts tokens; otherwise its embeddings are trained.
        passes: How often the recipe uses each row; chosen by the budget if None.
        ablated_schemes: Schemes that also run without one step of the recipe.
    """

    name: str
    about: str
    length: int
    hidden_size: int
    schemes: tuple[tuple[Any, tuple[int, ...]], ...]
    swept_schemes: tuple[Any, ...]
    naive_budgets: tuple[int, ...]
    naive_batches: tuple[int, ...]
    naive_rates: tuple[float, ...]
    seconds_per_row: float
    seconds_per_step: float
    texts: tuple[str, ...]
    load: Callable[[], Any]
    rows: Callable[[], Batch] | None = None
    measures: dict[str, Callable[[], Measure]] = dataclasses.field(default_factory=dict)
    has_head: bool = True
    passes: int | None = None
    ablated_schemes: tuple[Any, ...] = ()
    seeds: int = 3


STORIES = Subject(
    name="stories260k",
    about="A LLaMA with 260 thousand parameters, which trains on text that it generates. Shortfall: relative increase "
    "of perplexity on generated text (own) and on stories that were not sampled from it (real).",
    length=STORY_LENGTH,
    hidden_size=64,
    schemes=(
        ("t5", (30_000, 75_000, 300_000)),
        (T5_PER_LAYER, (30_000, 75_000, 300_000, 600_000)),
        ("kerple", (30_000, 75_000, 300_000)),
        ("alibi", (30_000, 75_000, 300_000)),
        (ALIBI_PER_LAYER, (30_000, 75_000, 300_000)),
    ),
    swept_schemes=("t5", "alibi"),
    naive_budgets=(30_000, 300_000),
    naive_batches=(1, 4),
    naive_rates=(1e-3, 2e-3, 5e-3),
    seconds_per_row=0.11,
    seconds_per_step=0.06,
    texts=("own", "real"),
    load=load_stories,
    rows=lambda: story_rows("more_stories", MORE_STORY_ROWS, seed=2),
    measures={
        "own": lambda: perplexity_increase(load_stories, generated_stories),
        "real": lambda: perplexity_increase(load_stories, written_stories),
    },
    ablated_schemes=("t5", "alibi"),
)
SORTING = Subject(
    name="gpt-nano-sort",
    about="A GPT-2 with 88 thousand parameters that sorts six digits. Shortfall: fraction of the inputs sorted by the "
    "original (of all 729) that are no longer sorted. Only predictions of sorted digits are trained.",
    length=2 * DIGITS - 1,
    hidden_size=48,
    schemes=tuple((scheme, (40_000, 100_000, 400_000)) for scheme in SCHEMES),
    swept_schemes=("sinusoidal", "rope", "alibi", "t5"),
    naive_budgets=(40_000, 400_000),
    naive_batches=(4, 16, 64),
    naive_rates=(1e-3, 2e-3, 5e-3),
    seconds_per_row=0.0005,
    seconds_per_step=0.045,
    texts=("all inputs",),
    load=load_sorter,
    rows=sorting_rows,
    measures={"all inputs": sorting_shortfall},
)
SENTENCES = Subject(
    name="MiniLM",
    about="A BERT with 22 million parameters that embeds sentences, trained on WikiText-2. Shortfall: 1 - mean cosine "
    "similarity to the original's embeddings of held-out text. Plain fine-tuning trains that similarity.",
    length=SENTENCE_LENGTH,
    hidden_size=384,
    schemes=tuple((scheme, (4_000, 10_000, 40_000)) for scheme in ("rope", "alibi", "t5", "deberta")),
    swept_schemes=("rope", "t5"),
    naive_budgets=(40_000,),
    naive_batches=(1, 8),
    naive_rates=(1e-4, 3e-4),
    seconds_per_row=0.15,
    seconds_per_step=0.25,
    texts=("real",),
    load=load_minilm,
    rows=lambda: sentence_rows("valid.txt", first_chunk_only=False),
    measures={"real": sentence_shortfall},
    has_head=False,
)
CHARACTERS = Subject(
    name="gpt2-char",
    about="A GPT-2 with 0.8 million parameters, trained on the spot on Shakespeare, one token per byte. Shortfall: "
    "relative increase of perplexity on held-out Shakespeare (real) and on text that it generates (own).",
    length=CHAR_LENGTH,
    hidden_size=128,
    schemes=tuple((scheme, (20_000, 60_000, 200_000)) for scheme in ("rope", "alibi", "t5", "deberta")),
    swept_schemes=("rope", "t5"),
    naive_budgets=(200_000,),
    naive_batches=(1, 4, 16),
    naive_rates=(5e-4, 1e-3, 2e-3),
    seconds_per_row=0.06,
    seconds_per_step=0.06,
    texts=("real", "own"),
    load=load_char_model,
    rows=lambda: {"input_ids": shakespeare(held_out=False)},
    measures={
        "real": lambda: perplexity_increase(load_char_model, lambda: shakespeare(held_out=True)),
        "own": lambda: perplexity_increase(
            load_char_model,
            lambda: cached("gpt2_char", lambda: generate_text(load_char_model(), CHAR_ROWS, CHAR_LENGTH, seed=1)),
        ),
    },
)
SMOLLM2 = Subject(
    name="SmolLM2",
    about="SmolLM2-135M-Instruct (weights from a 4-bit release), trained on the validation split of WikiText-2 by the "
    "command `hf-posenc train`. Shortfall: relative increase of perplexity on the beginning of the test split (real) "
    "and on text that the original generates (own). Seconds do not include the warm start.",
    length=256,
    hidden_size=576,
    schemes=(
        (NONE_IN_SOME_LAYERS, (20_000, 100_000)),
        (T5_PER_LAYER, (20_000, 200_000)),
        (ALIBI_PER_LAYER, (20_000, 200_000)),
    ),
    swept_schemes=(T5_PER_LAYER,),
    naive_budgets=(20_000,),
    naive_batches=(1,),
    naive_rates=(1e-4, 3e-4),
    seconds_per_row=6.0,
    seconds_per_step=2.0,
    texts=("real", "own"),
    load=smollm2_directory,
    passes=1,
    seeds=1,
)
SUBJECTS = {subject.name: subject for subject in (STORIES, SORTING, SENTENCES, CHARACTERS, SMOLLM2)}
