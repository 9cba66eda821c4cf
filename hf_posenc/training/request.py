"""What a training run is asked to do, and a note of it beside what it makes, so that a changed request is noticed."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

from ..checkpoints.file_names import COMPANION_FILES, LENGTH_CURVE_FILE, RECOVERY_FILE
from .recipe import RECOMMENDED, Recipe
from .saving import UNFINISHED, checkpoints_in

Trained = Literal["all", "positions", "lora"]
TRAINED = get_args(Trained)
SELF = "self"
NOTE = "run.json"
"""In the output directory: what was asked for, what the rows were, and whether it was finished."""
OWN_TEXT = "own_text.safetensors"
"""Beside it: the text that a model wrote itself."""
WEIGHTS = ("config.json", "model*.safetensors", "model.safetensors.index.json")
LEFT = (*WEIGHTS, *COMPANION_FILES, "training_args.json", OWN_TEXT, RECOVERY_FILE, LENGTH_CURVE_FILE)
"""What a run leaves in its directory that a later one must not find."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything but what transformers' TrainingArguments say."""

    model: str
    data: str
    train_length: str
    scheme: Any = None
    recipe: Recipe = RECOMMENDED
    teacher: str | None = None
    """Another teacher than the model as it was."""
    task: str | None = None
    trained: Trained = "all"
    lora_rank: int = 16
    position_learning_rate: float | None = None
    eval_data: str | None = None
    split: str = "train"
    eval_split: str = "validation"
    text_column: str | None = None
    label_column: str = "label"
    streaming: bool = False
    packing: bool | None = None
    mask_share: float = 0.15
    self_rows: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.trained not in TRAINED:
            raise ValueError(f"--train is one of {', '.join(TRAINED)}; got {self.trained!r}")
        if self.lora_rank < 1:
            raise ValueError(f"--lora-rank must be at least 1, got {self.lora_rank}")
        if not 0 < self.mask_share < 1:
            raise ValueError(f"--mask-share must be between 0 and 1, got {self.mask_share}")
        if self.self_rows is not None and self.self_rows < 1:
            raise ValueError(f"--self-rows must be at least 1, got {self.self_rows}")
        rate = self.position_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"--position-learning-rate must be above 0, got {rate}")


class Note:
    """What is known of the run in a directory."""

    def __init__(self, directory: Path, wanted: dict[str, Any]) -> None:
        self.path = directory / NOTE
        self.values = {**wanted, "finished": False}

    @classmethod
    def of(cls, directory: Path, request: Request, settings: dict[str, Any], restart: bool) -> Note:
        """Raise where the directory holds another run, or one that is done."""
        wanted = {"request": json.loads(json.dumps(dataclasses.asdict(request))), "settings": settings}
        note = cls(directory, wanted)
        if not note.path.is_file():
            if checkpoints_in(directory) or (directory / "config.json").exists():
                raise ValueError(f"{directory} holds something else than a run of train: take another --output-dir")
        elif not restart:
            note.check(_read(note.path))
        return note

    def check(self, earlier: dict[str, Any]) -> None:
        if "rows" not in earlier and not earlier.get("finished"):
            return  # it never came to train anything
        for part in ("request", "settings", "rows"):
            before, now = earlier.get(part, {}), self.values.get(part, {})
            changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)] if now else []
            if changed:
                told = "; ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
                raise ValueError(
                    f"{self.path.parent} holds a run that was asked for otherwise: {told}. Ask for the same to go on "
                    "with it, take another --output-dir, or begin anew with --restart"
                )
        if earlier.get("finished"):
            raise ValueError(
                f"{self.path.parent} holds a finished run: load it with from_pretrained, take another --output-dir, "
                "or begin anew with --restart"
            )
        self.values = {**earlier, **self.values}

    def add_rows(self, rows: dict[str, Any]) -> None:
        """What the text came to: the same again, or it was changed behind the run's back."""
        earlier, self.values["rows"] = dict(self.values), rows
        if "rows" in earlier:
            self.check({**earlier, "finished": False})

    def write(self, finished: bool = False) -> None:
        self.values["finished"] = finished
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        beside.replace(self.path)

    def clear(self) -> None:
        """Throw away what the run has made. A note stays, so that the directory is still known for one of a run."""
        directory = self.path.parent
        self.write()
        for path in {found for pattern in LEFT for found in directory.glob(pattern) if found.is_file()}:
            path.unlink()
        for checkpoint in checkpoints_in(directory):
            shutil.rmtree(checkpoint)
        shutil.rmtree(directory / UNFINISHED, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no table")
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}, the note of an earlier run, cannot be read ({error}): take another --output-dir, or begin anew "
            "with --restart"
        ) from None
