"""Draw the figures of docs/analysis.md and docs/evaluation.md, and note the numbers that go with them (`make figures`).

What comes from schemes, or from small models trained here, needs nothing else. Figures of real checkpoints are drawn
where their directories are given, and left as they are where not.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_posenc import analysis, plots
from hf_posenc.evaluation import figures
from scripts.small_evaluations import SCHEMES, of_lengths, of_likeness, of_passkeys, repeater
from scripts.small_models import LENGTH, read_text, train

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
LARGEST, DPI = 90_000, 100
LINES: list[str] = []
COMMON = """house water red run king seven paper music tree happy street doctor bread green winter horse letter school
river stone blue walk queen five book song flower sad road nurse milk yellow summer dog word teacher sea iron black jump
prince nine page dance grass angry bridge soldier wine white spring cat story student lake gold brown swim child two"""
"""Words that any English vocabulary has, for clouds around them."""


def show(name: str, figure: Any, *data: Any) -> None:
    """Write a small .png, and note down the numbers."""
    save_small(figure, FIGURES / f"{name}.png")
    say(f"[{name}]", *map(str, data), "")


def save_small(figure: Any, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI)
    image = Image.open(buffer).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size > LARGEST:  # fewer colours, spread over all that there are: those of rare values stay true
        image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def say(*lines: str) -> None:
    LINES.extend(lines)
    print(*lines, sep="\n", flush=True)


def named(data: Any, name: str) -> Any:
    return dataclasses.replace(data, name=name)


def of_schemes() -> None:
    model, plain = analysis.scheme_model, analysis.encoding
    wide = plain(model("sinusoidal", width=512, heads=8), 128)
    show("encoding", plots.encoding(wide), wide)
    moved = analysis.movement(wide)
    show("movement", plots.movement(moved), moved)
    buckets = {"type": "deberta", "buckets": 16, "max_distance": 64}
    kinds = {"t5": "t5", "shaw": "shaw, clipped at 16", "deberta": "deberta, 16 buckets"}
    found = [analysis.relative_rows(model(buckets if kind == "deberta" else kind, causal=False), 64) for kind in kinds]
    rows = [named(data, name) for data, name in zip(found, kinds.values(), strict=True)]
    show("relative", plots.relative(*rows), *rows)
    for scheme in ("alibi", "sandwich"):
        bias = analysis.bias_by_distance(model(scheme, heads=8), 128)
        show(f"bias-{scheme}", plots.bias(bias), bias)
    slow = named(analysis.decay(model({"type": "rope", "theta": 500000.0}, heads=1)), "rope, theta 500000")
    decays = [analysis.decay(model(scheme, heads=1)) for scheme in ("rope", "xpos")]
    show("decay", plots.decay(*decays, slow), *decays, slow)
    mixes = [analysis.separation(model("sinusoidal", width=width)) for width in (64, 256)]
    apart = analysis.separation(model("sinusoidal"), side_by_side=True)
    show("separation-sinusoids", plots.separation(*mixes, apart), *mixes, apart)


def of_small_models(steps: int) -> None:
    text, words = read_text()
    models = {}
    for mix in ("add", "concat", "attention"):
        models[mix], loss = train({"type": "learned", "mix": mix}, text, steps)
        say(f"a small GPT-2, learned positions, mix {mix}: loss {loss:.3f} after {steps} steps")
    mixes = [analysis.separation(found) for found in models.values()]
    mixes.append(analysis.separation(models["add"], side_by_side=True))
    show("separation-trained", plots.separation(*mixes), *mixes)
    common = [token for token, word in enumerate(words) if word.isalpha()][:128]
    cloud = analysis.clouds(models["add"], common, labels=[words[token] for token in common])
    cloud = named(cloud, "small GPT-2, add")
    show("clouds", plots.clouds(cloud), cloud)
    table = analysis.movement(named(analysis.encoding(models["add"], LENGTH), "learned by a small GPT-2"))
    show("movement-learned", plots.movement(table), table)
    of_small_rotation(text, steps)


def of_small_rotation(text: torch.Tensor, steps: int) -> None:
    rope, loss = train("rope", text, steps)
    say(f"the same with rope: loss {loss:.3f}")
    ids = text[: 16 * LENGTH].view(16, LENGTH)
    used = analysis.frequencies(rope, ids, "small GPT-2, rope")
    show("frequencies", plots.frequencies(used), used)
    before = analysis.attention_by_distance(rope, ids, "small GPT-2, rope")
    after = analysis.attention_by_distance(under(rope, "alibi"), ids, "alibi, before any training")
    show("attention", plots.attention(before, after), before, after)


def under(model: Any, scheme: str) -> Any:
    """A model with the same weights under another scheme, neither of which has parameters."""
    config = copy.deepcopy(model.config)
    config.position_scheme = scheme
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(model.state_dict())
    return other.eval()


def of_llama(directory: str, name: str, data: Path) -> None:
    model, ids = analysis.checkpoint_model(directory), analysis.token_rows(directory, data, 256, 16)
    slower = analysis.checkpoint_model(directory, {"type": "rope", "theta": 500000.0})
    used = [analysis.frequencies(model, ids, name), analysis.frequencies(slower, ids, "theta 500,000, not trained")]
    show("frequencies-llama", plots.frequencies(*used), *used)
    before = analysis.attention_by_distance(model, ids, name)
    changed = analysis.checkpoint_model(directory, "alibi")
    after = analysis.attention_by_distance(changed, ids, "alibi, before any training")
    show("attention-llama", plots.attention(before, after), before, after)


def of_bert(directory: str, name: str) -> None:
    model = analysis.checkpoint_model(directory)
    first, table = (named(analysis.encoding(model, length), name) for length in (128, 512))
    show("encoding-bert", plots.encoding(first), first)
    moved = analysis.movement(table)
    sinusoids = analysis.encoding(analysis.scheme_model("sinusoidal", width=table.table.shape[1], heads=12), 512)
    others = analysis.movement(sinusoids)
    show("movement-bert", plots.movement(moved, others), moved, others)
    mixes = [named(analysis.separation(model, side_by_side=side), name) for side in (False, True)]
    show("separation-bert", plots.separation(*mixes), *mixes)
    reader = AutoTokenizer.from_pretrained(directory)
    common = reader.convert_tokens_to_ids(COMMON.split())
    cloud = named(analysis.clouds(model, common, labels=COMMON.split()), name)
    show("clouds-bert", plots.clouds(cloud), cloud)


def evaluated(name: str, figure: Any, data: Any = None) -> None:
    show(f"eval-{name}", figure, *([] if data is None else [data]))


def of_repeaters(steps: int) -> None:
    models = {}
    for name, scheme in SCHEMES.items():
        models[name], loss = repeater(scheme, steps)
        say(f"a small GPT-2 that repeats, {name}: loss {loss:.3f} after {steps} steps")
    found = of_passkeys(models)
    evaluated("passkey", figures.passkey_figure(found), found)
    evaluated("passkey-preference", figures.passkey_figure(found, "preference"))


def of_checkpoints(llama: str, bert: str, data: Path) -> None:
    by_length, by_order = of_lengths(llama, data, 24_576)
    evaluated("length-curve", figures.length_curve_figure(by_length), by_length)
    evaluated("positions", figures.position_figure(by_length))
    evaluated("order", figures.order_figure(by_order), by_order)
    likeness = of_likeness(bert, data, 3_072)
    evaluated("similarity", figures.similarity_figure(likeness), likeness)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of training, for each of the small models")
    parser.add_argument("--repeating-steps", type=int, default=600, help="of training, for each that repeats")
    parser.add_argument("--llama", help="a LLaMA checkpoint's directory")
    parser.add_argument("--llama-name", help="what it is called in the figures")
    parser.add_argument("--bert", help="a BERT checkpoint's directory")
    parser.add_argument("--bert-name", help="what it is called in the figures")
    parser.add_argument("--data", type=Path, help="a text file, for the LLaMA")
    asked = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    FIGURES.mkdir(exist_ok=True)
    of_schemes()
    of_small_models(asked.steps)
    of_repeaters(asked.repeating_steps)
    if asked.llama and asked.data:
        of_llama(asked.llama, asked.llama_name or Path(asked.llama).name, asked.data)
    else:
        print("no --llama and --data: the figures of a LLaMA checkpoint stay as they are")
    if asked.bert:
        of_bert(asked.bert, asked.bert_name or Path(asked.bert).name)
    else:
        print("no --bert: the figures of a BERT checkpoint stay as they are")
    if asked.llama and asked.data and asked.bert:
        of_checkpoints(asked.llama, asked.bert, asked.data)
        (FIGURES / "numbers.txt").write_text("\n".join(LINES), encoding="utf-8")


if __name__ == "__main__":
    main()
