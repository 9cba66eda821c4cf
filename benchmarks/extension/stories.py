"""The methods, and their quality on stories260k."""

from __future__ import annotations

from typing import Any

import hf_posenc

from ..recovery.tasks import data_path, load_stories, story_rows

LENGTHS, TRAINED_LENGTH = ("1x", "2x", "4x"), 512
STORIES, PASSKEY_TRIALS = 64, 3
METHODS: dict[str, Any] = {
    "plain": "rope",
    "Self-Extend": {"type": "rope", "extend": {"method": "self_extend"}},
    "ReRoPE": {"type": "rope", "extend": {"method": "rerope"}},
    "dual chunk attention": {"type": "rope", "extend": {"method": "dca"}},
    "YaRN": {"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic NTK": {"type": "rope", "scaling": {"rope_type": "dynamic", "factor": 1.0}},
    "Leaky ReRoPE": {"type": "rope", "extend": {"method": "leaky_rerope"}},
}
"""All with their default options; factor 1 of dynamic NTK grows with the length alone."""


def measure_quality(name: str) -> dict[str, dict[str, float]]:
    """Perplexity, and how often the hidden passkey is preferred to a random one, by multiple of the trained length."""
    text, model = story_rows()["input_ids"][:STORIES], load_stories()
    if METHODS[name] != "rope":
        hf_posenc.retrofit(model, METHODS[name])
    report = hf_posenc.evaluate(
        {name: model},
        text.flatten(),
        lengths=LENGTHS,
        metrics=("perplexity", "passkey"),
        tokenizer=data_path("checkpoints", "stories260k"),
        passkey_trials=PASSKEY_TRIALS,
        progress=False,
    )
    return {
        multiple: {
            "perplexity": perplexity.perplexity.value,
            "interval": list(perplexity.perplexity.confidence_interval),
            "passkey": sum(depth.preference.value for depth in passkey.depths) / len(passkey.depths),
        }
        for multiple, perplexity, passkey in zip(LENGTHS, report.perplexity, report.passkey, strict=True)
    }
