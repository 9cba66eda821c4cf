"""Generate docs/schemes.md, the reference of all schemes, from the code (`make reference`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_posenc.registry import OptionInfo, SchemeInfo, describe_options, list_schemes
from hf_posenc.schemes import Kind
from hf_posenc.schemes.remapping import METHODS

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


FREQUENCIES = """\
#### Other frequencies

With the frequencies w_k of a plain or scaled rotation, wavelengths l_k = 2 pi / w_k and the trained length L:

| options | frequencies | paper |
| --- | --- | --- |
| `"frequency_fraction": 0.75` | the lowest quarter is 0 (p-RoPE) | \
Barbero et al. 2024, https://arxiv.org/abs/2410.06205 |
| `"resonance": true` | 2 pi / round(l_k): angles repeat exactly (Resonance RoPE; with a `yarn` scaling, Resonance \
YaRN) | Wang et al. 2024, https://arxiv.org/abs/2403.00071 |
| `"fourier": 0.3` | 0 if l_k > L; for the others, cos(w_k n) + sum_m a_mk cos(w_m n) in place of cos(w_k n), and \
sin(w_k n) + sum_m b_mk sin(w_m n) in place of sin(w_k n), with normal a, b of standard deviation 0.3 / sqrt(number of \
frequencies) (FoPE) | Hua et al. 2024, https://arxiv.org/abs/2412.17739 |
| `"scaling": {"rope_type": "longrope", "short_factor": [1.0, ...], "long_factor": [...]}` | w_k / short_factor_k up \
to the original length, w_k / long_factor_k beyond: the factors that LongRoPE2 searches for, which is not done here | \
Shang et al. 2025, https://arxiv.org/abs/2502.20082 |

The random coefficients of `fourier` are fixed, the same in every layer and head (in the paper, they may differ by
head), and not stored in the checkpoint. Logits then depend on both positions, not on their distance alone. A gain of 0
only drops the frequencies that complete no turn. All four change the angles that a checkpoint was trained with, so
fine-tune, or train from scratch. Their effect on quality has not been measured here. None of them adds parameters or a
noticeable cost.

Layers may rotate differently: list `rope` several times with `layers`, which also takes the layer types of a model
with sliding windows (Gemma 3, ModernBERT): `"full_attention"` or `"sliding_attention"`. What the options leave out
comes from the checkpoint's settings for that type. This example scales the layers with full attention and leaves the
others alone:

    [
        {"type": "rope", "layers": "full_attention", "scaling": {"rope_type": "linear", "factor": 8.0}},
        {"type": "rope", "layers": "sliding_attention"}
    ]
"""


EXTENSIONS = """\
#### Longer inputs without training

`extend` remaps distances that the model was not trained with to ones that it was, as in
`{"type": "rope", "extend": {"method": "self_extend", "window": 512, "group": 4}}`. Near keys keep their rotation. For
far keys, queries and keys are rotated to other positions, and one softmax covers both. Inputs without far keys are
bit-identical to those without `extend`. It works with `sdpa` and `eager` attention, in causal models, from Dynamic and
Static caches, and cannot be combined with score terms in the same layer. It has no parameters. Keys are rotated and
attended to a second time for far distances (with `dca`, a third time). Without gradients, memory stays linear in the
length.
[Choosing a scheme](choosing.md#i-want-4x-context-on-my-model) compares the methods.

With query position i, key position j and distance m = i - j, the remapped distance is:

| method | near keys | remapped distance of far keys | paper |
| --- | --- | --- | --- |"""


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
    if info.tested_against:
        yield f"- Tested against: {info.tested_against}"
    if info.options:
        yield "\n| option | default | type | description |"
        yield "| --- | --- | --- | --- |"
        for name, option in info.options.items():
            yield _row(f"`{name}`", option)
    yield ""
    if info.name == "rope":
        yield FREQUENCIES
        yield EXTENSIONS
        for name, method in METHODS.items():
            yield f"| `{name}` | {method.near} | {method.formula} | {method.paper} |"
        yield ""
        yield "| method | option | default | type | description |"
        yield "| --- | --- | --- | --- | --- |"
        for method_name, method in METHODS.items():
            for name, option in describe_options(method).items():
                yield _row(f"`{method_name}` | `{name}`", option)
        yield "\nNone is derived from the trained length: `window` is a quarter of it for `self_extend` and half of it"
        yield "for the others, `chunk_size` is three quarters of it, and `local_window` is the rest.\n"


def _row(name: str, option: OptionInfo) -> str:
    cells = (f"`{option.default!r}`", option.type, option.doc)
    return f"| {name} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    PAGE.write_text(render_page(list_schemes().values()), encoding="utf-8")


if __name__ == "__main__":
    main()
