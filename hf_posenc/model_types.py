"""The names that config files and transformers hold, in a module that imports nothing."""

VARIANT_PREFIX = "posenc_"
"""Before the stock `model_type`, it makes the variant's."""

STOCK_CONFIGS = {
    "transformers.models.bert.configuration_bert": "BertConfig",
    "transformers.models.gpt2.configuration_gpt2": "GPT2Config",
    "transformers.models.llama.configuration_llama": "LlamaConfig",
}
"""The config class of each architecture, by the module it is in."""

STOCK_TYPES = tuple(module.split(".")[2] for module in STOCK_CONFIGS)
