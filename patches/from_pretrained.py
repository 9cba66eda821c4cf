"""What `PreTrainedModel.from_pretrained` does about position schemes and the checkpoints that variants came from.

Libraries that read the config first pass it on together with the options of their users, where `position_scheme` would
be an unknown argument of the model. It goes into the config instead.

Libraries also load what belongs to a model by the name in its config. That is right for a tokenizer and wrong for
weights: an adapter would be put on the stock model, and the reference model of preference training would have another
encoding than the model that is trained. So the config of a variant keeps the name. The model itself, which PEFT asks,
has none, and no model can be loaded by the name that a variant's config holds.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_source_names: dict[int, str] = {}
"""The names that configs of variants hold, by identity: equal names that users write themselves are not among them."""


def keep_source_name(model: PreTrainedModel) -> None:
    """Let the config of a variant name its stock checkpoint, and the variant itself none."""
    from .compat import checkpoint_name, set_checkpoint_name

    name = checkpoint_name(model.config)
    if id(name) not in _source_names:
        name = str(name.encode(), "utf-8")  # another object
        if len(name) > 1:  # Python has one object for all equal strings of one character
            _source_names[id(name)] = name
    set_checkpoint_name(model, "", name)


def patch_from_pretrained(module: types.ModuleType) -> None:
    """Patch transformers.modeling_utils. Imports nothing: it runs whenever that is imported."""
    model_class = module.PreTrainedModel
    stock = vars(model_class)["from_pretrained"].__func__

    @functools.wraps(stock)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        if "position_scheme" in kwargs and kwargs.get("config") is not None:
            _move_scheme_into_config(kwargs)
        if id(pretrained_model_name_or_path) in _source_names:
            _check_source_name(pretrained_model_name_or_path, kwargs)
        return stock(cls, pretrained_model_name_or_path, *args, **kwargs)

    model_class.from_pretrained = classmethod(from_pretrained)


def _move_scheme_into_config(kwargs: dict[str, Any]) -> None:
    from transformers import PreTrainedConfig

    from .attach import with_scheme

    if isinstance(kwargs["config"], PreTrainedConfig):
        kwargs["config"] = with_scheme(kwargs["config"], kwargs.pop("position_scheme"))


def _check_source_name(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse to load a stock model by the name that a variant's config holds."""
    from hf_posenc.config import VariantConfig
    from hf_posenc.errors import PosEncError

    if kwargs.get("position_scheme") is None and not isinstance(kwargs.get("config"), VariantConfig):
        raise PosEncError(
            f"{name!r} is the stock checkpoint that a model with a position scheme was made from; loaded from there, a "
            "copy or reference of that model would have another encoding. Pass copy.deepcopy(model) as the reference "
            "model, or save the model and load it from where you saved it. To load the stock model itself, write its "
            "name out"
        )
