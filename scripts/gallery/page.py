"""The text of docs/gallery.md: one card per scheme, with its picture, cost, reach and the line to type."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_posenc.registry import SchemeInfo
from hf_posenc.schemes import Kind

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
FIGURES = ROOT / "docs" / "figures" / "gallery"
NUMBERS = FIGURES / "numbers.json"
INTRODUCTION = """\
# Gallery

<!-- Generated from the code: the text by `make reference`, pictures and numbers by `make figures`. -->

Every scheme at a glance. Each card shows the argument to pass to `from_pretrained`, as in
`AutoModelForCausalLM.from_pretrained("openai-community/gpt2", position_scheme="alibi")`. On the command line, that is
`hf-posenc convert openai-community/gpt2 --scheme alibi --out gpt2-alibi`. [Schemes](schemes.md) has formulas and all
options, and [Choosing a scheme](choosing.md) says what to use when.

For the pictures and perplexities, a GPT-2 with {layers} layers and width {width} was trained from scratch with each
scheme, for {steps} steps on rows of {trained} tokens from Python's help topics. That is enough to show what a scheme
does, not how good it is: differences of a few percent between schemes mean nothing. Perplexity is measured on held-out
text, at the trained length and at {longer} tokens, four times that length.
"""


def read_numbers() -> dict[str, Any]:
    """What was measured when the pictures were drawn: the setting, and the numbers of each scheme."""
    return json.loads(NUMBERS.read_text(encoding="utf-8"))


def render_page(schemes: Iterable[SchemeInfo], numbers: dict[str, Any]) -> str:
    """The page in Markdown, with a section per kind of scheme.

    Args:
        schemes: All schemes to show.
        numbers: What `read_numbers` returns.

    Returns:
        The text of the page.

    Raises:
        KeyError: If a scheme has no numbers yet; `make figures` measures them.
    """
    schemes = list(schemes)
    sections = [INTRODUCTION.format(**numbers["setting"])]
    for kind in Kind:
        shown = [info for info in schemes if info.kind is kind]
        if shown:
            cards = ["\n".join(_card(info, numbers["schemes"][info.name], numbers["setting"])) for info in shown]
            sections += [f"## {kind.value}\n", '<div class="grid cards" markdown>\n', *cards, "</div>\n"]
    return "\n".join(sections)


def scheme_argument(info: SchemeInfo) -> str:
    """What to pass as `position_scheme`; a scheme that carries no order is added to the model's own encoding."""
    return f'["learned", "{info.name}"]' if info.kind is Kind.TEMPERATURE else f'"{info.name}"'


def _card(info: SchemeInfo, numbers: dict[str, Any], setting: dict[str, Any]) -> Iterator[str]:
    yield f"-   ### {info.name}\n"
    yield f"    ![{info.name}: {numbers['caption']}](figures/gallery/{info.name}.png)\n"
    yield f"    *{numbers['caption']}*\n"
    yield f"    {info.summary}\n"
    yield f"    - Use: `position_scheme={scheme_argument(info)}`"
    added = f" Adds {numbers['parameters']:,} parameters to GPT-2 small." if numbers["parameters"] else ""
    yield f"    - Cost: {info.cost}.{added}"
    yield f"    - Length: {_reach(info, numbers, setting)}"
    yield f"    - [Formula, paper and options](schemes.md#{info.name})\n"


def _reach(info: SchemeInfo, numbers: dict[str, Any], setting: dict[str, Any]) -> str:
    trained, longer = setting["trained"], setting["longer"]
    here, there = numbers["perplexity"], numbers["longer_perplexity"]
    reach = "runs past the trained length" if info.extends else "ends with its table"
    after = f"an error at {longer}" if there is None else f"{there:.1f} at {longer}"
    return f"{reach}. Perplexity {here:.1f} at {trained} tokens, {after}."
