"""The supported model types. Imports nothing, so that `import hf_posenc` stays cheap."""

VARIANT_PREFIX = "posenc_"
"""A variant's `model_type` is this prefix and the stock one: `posenc_gpt2`."""

STOCK_CONFIGS = {
    "transformers.models.bert.configuration_bert": "BertConfig",
    "transformers.models.gpt2.configuration_gpt2": "GPT2Config",
    "transformers.models.llama.configuration_llama": "LlamaConfig",
}
"""The config class of each supported architecture, by the module that defines it."""

STOCK_TYPES = tuple(module.split(".")[2] for module in STOCK_CONFIGS)
"""The stock `model_type` of each supported architecture."""
