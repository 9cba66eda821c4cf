"""Generate docs/schemes.md, the reference of all schemes, from the code (`make reference`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_posenc.registry import SchemeInfo, list_schemes
from hf_posenc.schemes import Kind

PAGE = Path(__file__).parent.parent / "docs" / "schemes.md"
INTRODUCTION = """\
# Schemes

<!-- Generated from the code by `make reference`; a test checks that it is current. -->

A `position_scheme` is a name, a dict with a `type` and options, or a list of these. All options have defaults. In a
list, embedding terms are applied in order, score and value terms are summed, and rotations are chained. In layers with
a rotation, score terms read queries before it and keys after it, because keys are cached rotated.

Formulas use query position i, key position j, distance r = j - i, head size d, hidden size E, number of heads H, token
embedding x_i, and trained length n. "Neutral start" names the parameters whose initial values make the scheme a no-op
when it is added to the model's own encoding. `"init": "paper"`, where a scheme has it, is for training from scratch.

Schemes at the input embedding have a `mix`, which combines the token embedding x with the position embedding p:

- `add`: x + p.
- `concat`: W [x; p]. W starts at [I | I], which is the sum.
- `attention`: w V x + (1 - w) U p, where w is a softmax over the scores of x and p for one query. The query is a
  projection of the token itself, or of the mean of all tokens in the document (in causal models, all tokens so far).
  Its projection starts at zero, and V and U at twice the identity, which is the sum.
"""


def render_page(schemes: Iterable[SchemeInfo]) -> str:
    """The reference page in Markdown, with a section per kind of scheme."""
    schemes = list(schemes)
    sections = [INTRODUCTION]
    for kind in Kind:
        entries = ["\n".join(_entry(info)) for info in schemes if info.kind is kind]
        sections.extend([f"## {kind.value}\n", *entries] if entries else [])
    return "\n".join(sections)


def _entry(info: SchemeInfo) -> Iterator[str]:
    yield f"### {info.name}\n"
    yield f"{info.summary}\n"
    yield f"    {info.formula}\n"
    yield f"- Paper: {info.paper}"
    yield f"- Cost: {info.cost}"
    yield f"- Beyond the trained length: {'runs' if info.extends else 'raises an error at the end of its table'}"
    yield f"- Neutral start: {info.neutral}"
    if info.options:
        yield "\n| option | default | type | description |"
        yield "| --- | --- | --- | --- |"
        for name, option in info.options.items():
            cells = (f"`{name}`", f"`{option.default!r}`", option.type, option.doc)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def main() -> None:
    PAGE.write_text(render_page(list_schemes().values()), encoding="utf-8")


if __name__ == "__main__":
    main()
