"""Saving models: what is written must name every scheme, also that of a part, such as the text model of Gemma 3."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME, logging

from hf_posenc.config import VariantConfig, add_sentinel
from hf_posenc.errors import PosEncError
from hf_posenc.model_types import VARIANT_PREFIX

from .lengths import check_config_length, check_max_length, config_length
from .variants import base_models

logger = logging.get_logger(__name__)


def install_save_guard() -> None:
    """Refuse to save a model whose config does not name its scheme. Inert for stock models; idempotent."""
    stock = PreTrainedModel.save_pretrained
    if hasattr(stock, "guarded_by_posenc"):
        return

    @functools.wraps(stock)
    def save_pretrained(self: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        with _naming_parts(self) as names_parts:
            check_saved_config(self)
            _warn_of_shorter_config(self)
            if names_parts and kwargs.get("push_to_hub"):
                raise PosEncError(
                    "A model with a position scheme in a part of it cannot be saved and pushed in one call; use "
                    "model.push_to_hub(...)"
                )
            result = stock(self, save_directory, *args, **kwargs)
            if names_parts:
                _mark_parts(Path(save_directory) / CONFIG_NAME)
        return result

    save_pretrained.guarded_by_posenc = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained


def check_saved_config(model: PreTrainedModel) -> None:
    """Refuse to write a config that does not describe the model: it would load as another one."""
    bases = base_models(model)
    if isinstance(model.config, VariantConfig) and not bases:
        raise PosEncError(
            f"config.position_scheme is {model.config.position_scheme!r}, but the model was built without it. Change a "
            "live model with hf_posenc.retrofit, or build a new one from the config"
        )
    saved = [config.position_scheme for config in _nested_configs(model.config) if isinstance(config, VariantConfig)]
    for base in bases:
        scheme = base.posenc.position_scheme
        if scheme not in saved:
            raise PosEncError(
                f"{type(base).__name__} inside {type(model).__name__} has the position scheme {scheme!r}, but the "
                "config that would be saved does not name it, so the model would load without it. Retrofit the whole "
                "model instead of a part, or build it from configs with a position_scheme"
            )


def _warn_of_shorter_config(model: PreTrainedModel) -> None:
    """Before a model is saved: warn if it has read longer inputs than its config names, where tools will cut them."""
    for base in base_models(model):
        length, longest = config_length(base.config), base.posenc.longest_input
        if longest > length and _can_be(base, longest):
            logger.warning_once(
                f"This model has read inputs of {longest:,} tokens, but its config.json will say {length:,}, where "
                "tools such as sentence-transformers cut inputs after loading it. To keep the longer length, call "
                f"hf_posenc.set_max_length(model, {longest}) before saving."
            )


def _can_be(base: Any, length: int) -> bool:
    try:
        check_max_length(base.position_scheme, length)
        check_config_length(base.position_scheme, base.config)
    except PosEncError:
        return False
    return True


@contextlib.contextmanager
def _naming_parts(model: PreTrainedModel) -> Iterator[bool]:
    """While the block runs, the config of a model has the configs of its retrofitted parts in place of stock ones.

    Yields whether it names the scheme of any part.
    """
    original = model.config
    if isinstance(original, VariantConfig):
        yield False
        return
    config = copy.copy(original)
    for name, nested in list(vars(original).items()):
        bases = [base for base in base_models(model) if getattr(base.config, "stock_class", None) is type(nested)]
        others = [other for other in vars(original).values() if type(other) is type(nested)]
        if len(bases) == len(others) == 1:  # otherwise it is not clear which part it describes
            setattr(config, name, bases[0].config)
    names_parts = any(isinstance(nested, VariantConfig) for nested in vars(config).values())
    model.config = config if names_parts else original
    try:
        yield names_parts
    finally:
        model.config = original


def _mark_parts(path: Path) -> None:
    """Put the sentinel into the configs of parts, or stock classes would build them without their scheme."""
    if not path.is_file():  # a process other than the main one
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    for nested in values.values():
        if isinstance(nested, dict) and str(nested.get("model_type")).startswith(VARIANT_PREFIX):
            add_sentinel(nested)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _nested_configs(config: object) -> Iterator[PreTrainedConfig]:
    """A config and those nested in it."""
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _nested_configs(value)
