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


class SourceName(str):
    """The name that the config of a variant holds; equal names that users write themselves are plain strings."""


def keep_source_name(model: PreTrainedModel) -> None:
    """Let the config of a variant name its stock checkpoint, and the variant itself none."""
    from .compat import checkpoint_name, set_checkpoint_name

    set_checkpoint_name(model, "", SourceName(checkpoint_name(model.config)))


def patch_from_pretrained(module: types.ModuleType) -> None:
    """Patch transformers.modeling_utils. Imports nothing: it runs whenever that is imported."""
    model_class = module.PreTrainedModel
    stock = vars(model_class)["from_pretrained"].__func__

    @functools.wraps(stock)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        if "position_scheme" in kwargs and kwargs.get("config") is not None:
            _move_scheme_into_config(kwargs)
        if isinstance(pretrained_model_name_or_path, SourceName):
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
