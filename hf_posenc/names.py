"""The names that config files hold, in a module that imports nothing."""

VARIANT_PREFIX = "posenc_"
"""Before the stock `model_type`, it makes the variant's."""
