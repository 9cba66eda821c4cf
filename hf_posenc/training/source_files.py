"""Files of the checkpoint that a run starts from: checked before anything is trained, and copied to its variant."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import CONFIG_NAME, logging

from ..checkpoints import (
    COMPANION_FILES,
    Companions,
    check_checkpoint_links,
    find_checkpoint,
    read_json_object,
    remove_code_fields,
)
from .arguments import TrainRequest

logger = logging.get_logger(__name__)


def check_source_links(request: TrainRequest) -> None:
    """Refuse local models, also the teacher, with links to files that are not theirs: training would reveal them."""
    for source in (request.model, request.teacher_model):
        directory = None if source is None else Path(source).expanduser()
        if directory is not None and directory.is_dir():
            check_checkpoint_links(directory)


def check_companions(request: TrainRequest, is_main_process: bool) -> None:
    """Refuse files that could not be copied to the variant, and say what will be left out: code and its names."""
    directory = _find_source(request)
    fields, left_out = read_json_object(directory / CONFIG_NAME), Companions.read(directory).left_out
    names = [*(f"{field} in {CONFIG_NAME}" for field in remove_code_fields(fields)), *left_out]
    if names and is_main_process:
        logger.warning(f"Left out of the variant, because it is or names code: {', '.join(names)}")


def read_companions(request: TrainRequest) -> Companions:
    """Files of the checkpoint that Trainer does not save, such as the modules of sentence-transformers."""
    return Companions.read(_find_source(request))


def _find_source(request: TrainRequest) -> Path:
    return find_checkpoint(request.model, request.revision, patterns=(CONFIG_NAME, *COMPANION_FILES))
