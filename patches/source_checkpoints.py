"""The checkpoint that a variant was made from: tokenizers are loaded from it, but it is not the variant.

Libraries load what belongs to a model by the name in its config. That is right for a tokenizer and wrong for weights:
an adapter would be put on the stock model, and the reference model of preference training would have another encoding
than the model that is trained. So the config of a variant keeps the name. The model itself, which PEFT asks, has none,
and no model can be loaded by the name that a variant's config holds.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from hf_posenc.config import VariantConfig
from hf_posenc.errors import PosEncError

from .compat import checkpoint_name, set_checkpoint_name

_source_names: dict[int, str] = {}
"""The names that configs of variants hold, by identity: equal names that users write themselves are not among them."""


def keep_source_name(model: PreTrainedModel) -> None:
    """Let the config of a variant name its stock checkpoint, and the variant itself none."""
    name = checkpoint_name(model.config)
    if id(name) not in _source_names:
        name = str(name.encode(), "utf-8")  # another object
        if len(name) > 1:  # Python has one object for all equal strings of one character
            _source_names[id(name)] = name
    set_checkpoint_name(model, "", name)


def install_load_guard() -> None:
    """Refuse to load a stock model by the name that a variant's config holds. Idempotent."""
    stock = vars(PreTrainedModel)["from_pretrained"].__func__
    if hasattr(stock, "guarded_by_posenc"):
        return

    @functools.wraps(stock)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        if id(pretrained_model_name_or_path) in _source_names and not _names_scheme(kwargs):
            raise PosEncError(
                f"{pretrained_model_name_or_path!r} is the stock checkpoint that a model with a position scheme was "
                "made from; loaded from there, a copy or reference of that model would have another encoding. Pass "
                "copy.deepcopy(model) as the reference model, or save the model and load it from where you saved it. "
                "To load the stock model itself, write its name out"
            )
        return stock(cls, pretrained_model_name_or_path, *args, **kwargs)

    from_pretrained.guarded_by_posenc = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _names_scheme(kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `from_pretrained` ask for a position scheme."""
    return kwargs.get("position_scheme") is not None or isinstance(kwargs.get("config"), VariantConfig)
