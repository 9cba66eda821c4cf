"""BERT checkpoints of transformers 4 with relative positions, which transformers 5 reads as plain absolute ones.

Their config.json says `position_embedding_type` "relative_key" or "relative_key_query", and each layer has a table
`distance_embedding.weight` with a row for each distance. That is `shaw` on the keys alone, so it is what they load as.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.config import FRESH, LEGACY, VariantConfig
from hf_posenc.spec import parse_position_scheme

FIELD = "position_embedding_type"
RELATIVE_TYPES = ("relative_key", "relative_key_query")
LEGACY_TABLE, LEGACY_PARAMETER = (
    r"\.attention\.self\.distance_embedding\.weight",
    ".attention.self.position_scheme.0.keys",
)


class PositionEmbeddingType:
    """The `position_embedding_type` attribute of a config class: plain, but for the two values that name a scheme."""

    def __get__(self, config: PreTrainedConfig | None, owner: type | None = None) -> Any:
        if config is None:
            return self
        if isinstance(config, VariantConfig) and config.scheme_is_legacy:
            return RELATIVE_TYPES[parse_position_scheme(config.position_scheme)[0].options.query_term]  # type: ignore[attr-defined]
        if FIELD not in config.__dict__:
            raise AttributeError(f"{type(config).__name__!r} object has no attribute {FIELD!r}")
        return config.__dict__[FIELD]

    def __set__(self, config: PreTrainedConfig, value: Any) -> None:
        if isinstance(config, VariantConfig) and config.scheme_is_legacy and value not in RELATIVE_TYPES:
            config.forget_scheme()  # someone wants it read as transformers 5 does
        own = isinstance(config, VariantConfig) or self is type(config).__dict__.get(FIELD)
        if value not in RELATIVE_TYPES or not own:
            config.__dict__[FIELD] = value
        elif config.position_scheme is None:
            _rename_on_loading()
            config.position_scheme = {
                "type": "shaw",
                "max_distance": max(config.max_position_embeddings - 1, 1),
                "values": False,
                "query_term": value == "relative_key_query",
            }
            config.__dict__.update({FRESH: False, LEGACY: True})

    def __delete__(self, config: PreTrainedConfig) -> None:
        config.__dict__.pop(FIELD, None)


def install(stock_class: type[PreTrainedConfig]) -> None:
    """Let a config class understand the old field. Does nothing the second time."""
    if FIELD not in stock_class.__dict__:
        setattr(stock_class, FIELD, PositionEmbeddingType())


def _rename_on_loading() -> None:
    """Have `from_pretrained` read the old tables under their new name. Inert for all other checkpoints."""
    from transformers.core_model_loading import WeightRenaming
    from transformers.modeling_utils import PreTrainedModel

    stock = PreTrainedModel._load_pretrained_model
    if hasattr(stock, "renames_for_posenc"):
        return

    class Renaming(WeightRenaming):
        """Transformers reverses on saving what it renamed on loading: a saved variant has the new names."""

        def reverse_transform(self) -> WeightRenaming:
            return self  # which finds nothing to rename: no parameter of the model has the old name

    @functools.wraps(stock)
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
        configs = (module.__dict__.get("config") for module in model.modules())
        if any(isinstance(config, VariantConfig) and config.scheme_is_legacy for config in configs):
            mapping = [Renaming(LEGACY_TABLE, LEGACY_PARAMETER), *(load_config.weight_mapping or [])]
            load_config = dataclasses.replace(load_config, weight_mapping=mapping)
        return stock(model, state_dict, checkpoint_files, load_config, *a, **k)

    _load_pretrained_model.renames_for_posenc = True  # type: ignore[attr-defined]
    PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)
