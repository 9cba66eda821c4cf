"""The supported model types. Imports nothing, so that `import hf_posenc` stays cheap."""

VARIANT_PREFIX = "posenc_"
"""A variant's `model_type` is this prefix and the stock one: `posenc_gpt2`."""

MODEL_TYPES = [
    "bert",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "olmo",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "phimoe",
    "granite",
    "granitemoe",
    "starcoder2",
    "seed_oss",
    "apertus",
    "arcee",
    "persimmon",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "smollm3",
    "cohere",
    "cohere2",
    "exaone4",
    "glm",
    "glm4",
    "helium",
    "ernie4_5",
    "nanochat",
    "stablelm",
    "gpt_oss",
    "nemotron",
    "gpt_neox",
    "modernbert",
    "modernbert-decoder",
    "eurobert",
    "nomic_bert",
    "jina_embeddings_v3",
    "gte",
    "electra",
    "ernie",
    "albert",
    "distilbert",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "data2vec-text",
    "opt",
    "biogpt",
    "gpt_bigcode",
    "cwm",
    "glm4_moe",
    "granitemoeshared",
    "hy_v3",
    "hyperclovax",
    "jais2",
    "jetmoe",
    "mellum",
    "minimax_m2",
    "solar_open",
    "afmoe",
    "cohere2_moe",
    "exaone_moe",
    "kolibri1",
    "diffllama",
    "dots1",
    "ministral",
    "vaultgemma",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
]
"""The stock `model_type` of each supported architecture."""

ALIASES = {"gpt-sw3": "gpt2"}
"""Other names in config.json that load the same classes."""

CONFIG_MODULES = {
    "data2vec-text": "data2vec.configuration_data2vec_text",
    "gemma3_text": "gemma3.configuration_gemma3",
    "qwen2_vl_text": "qwen2_vl.configuration_qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl.configuration_qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl.configuration_qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe.configuration_qwen3_vl_moe",
}
"""Where config classes are defined that are not in the module named after their model type."""


def config_module(model_type: str) -> str:
    """The module of transformers that defines the config class of a model type."""
    name = model_type.replace("-", "_")
    return f"transformers.models.{CONFIG_MODULES.get(model_type, f'{name}.configuration_{name}')}"
