"""Start a converted checkpoint from the attention of its source, in its files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from ..checkpoints import is_scheme_parameter, load_model, read_config, read_sequences
from ..errors import PosEncError
from ..patches import find_auto_class
from .closed_form import closed_form_start
from .stock_start import CLOSED_FORM_ROWS, FIT_LENGTH
from .warm_start import absorb_table_mean

logger = logging.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class ClosedFormStart:
    """A warm start for `convert_checkpoint`: `closed_form_start` on a little text, which takes no gradients.

    Attributes:
        text_file: The text; some 1,500 tokens of it are used.

    Example:
        >>> hf_posenc.convert_checkpoint(source, "t5", "out", warm_start=ClosedFormStart("text.txt"))
    """

    text_file: str | Path

    def __call__(self, source: Path, directory: Path) -> None:
        """Change the weights of a variant.

        Args:
            source: The directory of the stock checkpoint.
            directory: The directory of the variant; its weight files are replaced.

        Raises:
            PosEncError: If there is no text, or the checkpoint has a head that no Auto class loads.
        """
        config = read_config(source)
        auto_class = find_auto_class(config.architectures or [])
        if auto_class is None and config.architectures:
            raise PosEncError(
                f"A warm start would lose the head of {config.architectures[0]}, which no Auto class loads: convert "
                "without one, and call hf_posenc.training.closed_form_start on the loaded model"
            )
        input_ids = read_sequences(source, Path(self.text_file), FIT_LENGTH)[:CLOSED_FORM_ROWS]
        if len(input_ids) < 2:
            raise PosEncError(f"{self.text_file} is too short for a warm start: pass at least {2 * FIT_LENGTH} tokens")
        stock_model, _ = load_model(source, auto_class or "AutoModel", dtype=torch.float32)
        variant, _ = load_model(directory, auto_class or "AutoModel", dtype=torch.float32)
        initial = dict(stock_model.named_parameters())
        initial |= {name: weight.clone() for name, weight in variant.named_parameters() if is_scheme_parameter(name)}
        absorb_table_mean(stock_model, variant, input_ids.shape[1])
        closed_form_start(stock_model, variant, input_ids)
        if all(torch.equal(initial[name], weight) for name, weight in variant.named_parameters()):
            logger.warning("The warm start changed nothing: it is for schemes that add biases in place of a rotation")
            return
        for path in [*directory.glob("*.safetensors"), directory / SAFE_WEIGHTS_INDEX_NAME]:
            path.unlink(missing_ok=True)  # files may be hard links to the source, so they must not be overwritten
        variant.to(read_config(directory).dtype or torch.float32).save_pretrained(directory)
