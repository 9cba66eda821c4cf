"""Generate the reference page of all schemes: `python -m scripts.make_scheme_reference > docs/schemes.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hf_posenc.registry import SchemeInfo, list_schemes
from hf_posenc.schemes import Kind

HEAD = """\
# Schemes

<!-- Written from the code by `make reference`; a test sees to it that it is current. -->

For query i, key j, r = j - i, d the width of a head, E that of the model, H heads, x_i the word embedding, n the
model's own length. "Starts neutral" says which parameters make a scheme change nothing at step 0, beside the old
encoding; where there is an `init`, "paper" is the start that its paper gives, for training from scratch.

A `position_scheme` is a name, a dict with a `type` and the options below, or a list of these: embedding terms are
applied in order, score and value terms add up, rotations chain. Beside a rotation, terms of the query read it before
it is turned, and terms of the key read it as it is cached, which is turned.

Schemes of the input embedding have a `mix` of word x and position p:

- `add`: x + p.
- `concat`: W [x; p]. W starts at [I | I], which is the sum.
- `attention`: w V x + (1 - w) U p, where w is the softmax of the products of a query with a key of x and a key of p.
  The query is a projection of the word itself, or of the mean of all words of the document, in causal models of those
  up to the token. It starts at zero, and V and U at twice the identity, which is the sum.

Options can be left out; what stands beside them is their default.
"""


def page(listing: Iterable[SchemeInfo]) -> str:
    """The page, in Markdown."""
    infos = list(listing)
    parts = [HEAD]
    for kind in Kind:
        entries = ["\n".join(_entry(info)) for info in infos if info.kind is kind]
        parts.extend([f"## {kind.value}\n", *entries] if entries else [])
    return "\n".join(parts)


def _entry(info: SchemeInfo) -> Iterator[str]:
    yield f"### {info.name}\n"
    yield f"{info.summary}\n"
    yield f"    {info.formula}\n"
    yield f"- Paper: {info.paper}"
    yield f"- Cost: {info.cost}"
    yield f"- Past the trained length: {'yes' if info.extends else 'no, it ends with its table'}"
    yield f"- Starts neutral: {info.neutral}"
    if info.options:
        yield "\n| option | default | is | what it does |"
        yield "| --- | --- | --- | --- |"
        for name, about in info.options.items():
            cells = (f"`{name}`", f"`{about.default!r}`", about.type, about.doc)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


if __name__ == "__main__":
    print(page(list_schemes().values()), end="")
