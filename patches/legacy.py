"""Encoders of transformers 4 with relative positions, which transformers 5 reads as plain absolute ones.

Their config.json sets `position_embedding_type` to "relative_key" or "relative_key_query", and each layer has a table
`distance_embedding.weight` with a row per distance. That is `shaw` on the keys, so they load as such.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.config import SchemeOrigin, VariantConfig

from .compat import wrap_weight_loading

FIELD = "position_embedding_type"
RELATIVE_TYPES = ("relative_key", "relative_key_query")
LEGACY_MODEL_TYPES = (
    "albert",
    "bert",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
)
"""The supported model types that had the field in transformers 4."""
UNSCALED_MODEL_TYPES = ("albert",)
"""Those that added the products with the table to the scaled logits; the others scaled both."""
LEGACY_TABLE, LEGACY_PARAMETER = r"\.distance_embedding\.weight", ".position_scheme.0.keys"
"""The end of the key of a layer's table in an old checkpoint, as a pattern, and in the variant."""


class PositionEmbeddingTypeField:
    """The `position_embedding_type` attribute of a config class: plain, except for the values that name a scheme."""

    def __get__(self, config: PreTrainedConfig | None, owner: type | None = None) -> Any:
        if config is None:
            return self
        if _is_legacy(config):
            return RELATIVE_TYPES[config.position_scheme["query_term"]]
        if FIELD not in vars(config):
            raise AttributeError(f"{type(config).__name__!r} object has no attribute {FIELD!r}")
        return vars(config)[FIELD]

    def __set__(self, config: PreTrainedConfig, value: object) -> None:
        if _is_legacy(config) and value not in RELATIVE_TYPES:
            config.become_stock()  # the caller wants it read as transformers 5 does
        is_supported = isinstance(config, VariantConfig) or self is vars(type(config)).get(FIELD)
        if value not in RELATIVE_TYPES or not is_supported:
            vars(config)[FIELD] = value
        elif config.position_scheme is None:
            wrap_weight_loading(rename_legacy_tables, "renames_legacy_tables")
            config.position_scheme = {
                "type": "shaw",
                "max_distance": max(config.max_position_embeddings - 1, 1),
                "values": False,
                "query_term": value == "relative_key_query",
            }
            config.scheme_origin = SchemeOrigin.LEGACY

    def __delete__(self, config: PreTrainedConfig) -> None:
        vars(config).pop(FIELD, None)


def install_legacy_field(stock_class: type[PreTrainedConfig]) -> None:
    """Let a config class understand the old field. Idempotent."""
    if FIELD not in vars(stock_class):
        setattr(stock_class, FIELD, PositionEmbeddingTypeField())


def _is_legacy(config: object) -> bool:
    return isinstance(config, VariantConfig) and config.scheme_origin is SchemeOrigin.LEGACY


def rename_legacy_tables(model: PreTrainedModel, load_config: Any) -> Any:
    """Read the old tables under their new name. Inert for all other checkpoints."""
    from transformers.core_model_loading import WeightRenaming

    class LoadOnlyRenaming(WeightRenaming):
        """Transformers reverses renamings when it saves, but a saved variant keeps the new names."""

        def reverse_transform(self) -> WeightRenaming:
            return self  # matches nothing: no parameter of the model has the old name

    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    config = next(filter(_is_legacy, configs), None)
    if config is None:
        return load_config
    renaming: Any = LoadOnlyRenaming(LEGACY_TABLE, LEGACY_PARAMETER)
    if config.stock_class.model_type in UNSCALED_MODEL_TYPES:
        renaming = _scaled_renaming((config.hidden_size // config.num_attention_heads) ** 0.5, renaming)
    return dataclasses.replace(load_config, weight_mapping=[renaming, *(load_config.weight_mapping or [])])


def _scaled_renaming(factor: float, renaming: Any) -> Any:
    """A renaming that multiplies the tables by a factor, since `shaw` divides its terms as it does the logits."""
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Scale(ConversionOps):
        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
        ) -> dict[str, Any]:
            ((tensor,),) = input_dict.values()
            return {target_patterns[0]: tensor * factor}

    class LoadOnlyConverter(WeightConverter):
        def reverse_transform(self) -> Any:
            return renaming

    return LoadOnlyConverter(LEGACY_TABLE, LEGACY_PARAMETER, operations=[Scale()])
