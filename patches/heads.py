"""The head of a model by its class names, as transformers' Auto classes know it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import transformers

from .compat import model_class_names, predicts_tokens

VARIANT_CLASS_PREFIX = "PosEnc"
LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM")


def find_auto_class(class_names: Iterable[str], auto_classes: Sequence[str] = LANGUAGE_MODELS) -> str | None:
    """The first of some Auto classes that loads the head of a model.

    A model for pretraining, such as `BertForPreTraining`, has the head of a masked language model, unless it predicts
    something other than tokens, as ELECTRA's does.

    Args:
        class_names: The names of the model's class and its bases, or `architectures` of its config.
        auto_classes: The names of the Auto classes, in order of preference.

    Returns:
        The name of the Auto class; None if none of them has the head.

    Example:
        >>> find_auto_class(["PosEncGPT2LMHeadModel"])
        'AutoModelForCausalLM'
    """
    names = {name.removeprefix(VARIANT_CLASS_PREFIX) for name in class_names}
    for auto_class in auto_classes:
        if names & model_class_names(getattr(transformers, auto_class)):
            return auto_class
    pretraining = names & model_class_names(transformers.AutoModelForPreTraining)
    if any(predicts_tokens(getattr(transformers, name)) for name in pretraining):
        return "AutoModelForMaskedLM" if "AutoModelForMaskedLM" in auto_classes else None
    return None
