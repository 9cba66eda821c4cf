"""The card of a variant: which scheme, made from what, what was changed, what was measured, how to load it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from ..config import VariantConfig, auto_class_names
from ..registry import describe
from ..spec import SchemeSpec, parse_position_scheme
from .figures import Figures
from .readme import Readme

STOCK_NAMES = {"bert": "BERT", "gpt2": "GPT-2", "llama": "LLaMA"}
TABLES = ("wpe.weight", "embeddings.position_embeddings.weight")
"""How the names of the stock position tables end."""
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModel": "feature-extraction",
}
"""The Auto class that a card names, the first that gives the model's own class; and the task that the Hub knows."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The variant that a card is about."""

    repo: str
    config: Any
    tensors: dict[str, int]
    """How many numbers each has."""
    figures: Figures = dataclasses.field(default_factory=Figures)
    base_model: str | None = None
    revision: str | None = None
    """The branch that it is on, where that is not the main one."""

    @property
    def stock_type(self) -> str:
        return self.config.stock_class.model_type

    @property
    def auto_class(self) -> str:
        own = (self.config.architectures or [""])[0]
        known = auto_class_names[type(self.config)]
        return next((auto for auto in TASKS if known.get(auto) == own), "AutoModel")


def card_of(subject: Subject) -> Readme:
    """The generated card."""
    assert isinstance(subject.config, VariantConfig)
    parts = [_title(subject), _scheme(subject), _changes(subject), _measured(subject.figures), _loading(subject)]
    return Readme.generated(_metadata(subject), "\n\n".join(parts))


def _metadata(subject: Subject) -> dict[str, Any]:
    names = [item.name for item in parse_position_scheme(subject.config.position_scheme)]
    known = {
        "base_model": subject.base_model,
        "library_name": "transformers",
        "pipeline_tag": TASKS[subject.auto_class] if subject.config.architectures else None,
        "tags": list(dict.fromkeys(["hf_posenc", "positional-encoding", subject.stock_type, *names])),
    }
    return {key: value for key, value in known.items() if value is not None}


def _title(subject: Subject) -> str:
    stock = STOCK_NAMES[subject.stock_type]
    names = " and ".join(f"`{item.name}`" for item in parse_position_scheme(subject.config.position_scheme))
    made = f"[{subject.base_model}](https://huggingface.co/{subject.base_model})" if subject.base_model else None
    origin = f"Made from {made}: a" if made else "A"
    return (
        f"# {subject.repo.rpartition('/')[2]}\n\n"
        f"{origin} {stock} model whose positional encoding is {names}, by `hf_posenc`."
    )


def _scheme(subject: Subject) -> str:
    scheme = json.dumps(subject.config.position_scheme, indent=2)
    about = "\n".join(_about(item) for item in parse_position_scheme(subject.config.position_scheme))
    return f"## Position scheme\n\n```json\n{scheme}\n```\n\n{about}"


def _about(item: SchemeSpec) -> str:
    info = describe(item.scheme)
    options = {field.name: getattr(item.options, field.name) for field in dataclasses.fields(item.options)}
    if item.layers is not None:
        options["layers"] = item.layers
    told = ", ".join(f"`{name}` = `{json.dumps(value, default=str)}`" for name, value in options.items())
    reach = "runs past the trained length" if info.extends else "ends with its table"
    return f"- **{info.name}**: {info.summary} {info.paper}; {reach}.{f' Options: {told}.' if told else ''}"


def _changes(subject: Subject) -> str:
    own = {name: numbers for name, numbers in subject.tensors.items() if "position_scheme." in name}
    rest = sum(subject.tensors.values()) - sum(own.values())
    lines = [f"- {_old_encoding(subject)}"]
    if own:
        by_place = {re.sub(r"\.\d+\.(?=.*position_scheme\.)", ".*.", name) for name in own}
        places = ", ".join(f"`{place}`" for place in sorted(by_place))
        lines.append(f"- Added: {sum(own.values()):,} parameters of the scheme, in {places}.")
    else:
        lines.append("- Added: no parameters.")
    lines.append(f"- The other {rest:,} parameters have the names and shapes of the stock architecture's.")
    return "## What was changed\n\n" + "\n".join(lines)


def _old_encoding(subject: Subject) -> str:
    stock = STOCK_NAMES[subject.stock_type]
    if subject.stock_type == "llama":
        turns = any(item.acts_at("rotate") for item in parse_position_scheme(subject.config.position_scheme))
        return f"{stock}'s own rotation of queries and keys is {'that of the scheme now' if turns else 'gone'}."
    table = next((name for name in subject.tensors if name.endswith(TABLES)), None)
    return f"{stock}'s own position table is {f'kept (`{table}`)' if table else 'gone'}."


def _measured(figures: Figures) -> str:
    if not figures:
        return (
            "## Measured\n\nNothing was measured. A changed encoding is new to the weights around it: without training "
            "under it, expect the model to be worse than the one it was made from."
        )
    tables = []
    if figures.recovery:
        rows = [f"| {name.replace('|', '/')} | {value:.6g} |" for name, value in figures.recovery.items()]
        tables.append("\n".join(["| recovery | |", "| --- | --- |", *rows]))
    if figures.length_curve:
        rows = [f"| {length:,} | {perplexity:.6g} |" for length, perplexity in figures.length_curve]
        tables.append("\n".join(["| length in tokens | perplexity |", "| --- | --- |", *rows]))
    return "## Measured\n\n" + "\n\n".join(tables)


def _loading(subject: Subject) -> str:
    place = f'"{subject.repo}"' + (f', revision="{subject.revision}"' if subject.revision else "")
    return f"""## How to load

```python
import hf_posenc  # pip install hf_posenc
from transformers import {subject.auto_class}

model = {subject.auto_class}.from_pretrained({place})
```

Where `hf_posenc` is installed but not imported, pass `trust_remote_code=True`. Stock classes refuse this checkpoint
rather than read it as a {STOCK_NAMES[subject.stock_type]} with another encoding."""
