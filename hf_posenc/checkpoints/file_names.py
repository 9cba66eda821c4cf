"""Files beside a model's weights, in a module that imports nothing."""

COMPANION_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
)
"""What belongs to the tokenizer, to generation and to pipelines of sentences, and goes where the model goes."""

RECOVERY_FILE = "recovery.json"
"""What was measured at the end of training."""

LENGTH_CURVE_FILE = "length_curve.json"
"""Perplexity by length. Both are for the model card."""
