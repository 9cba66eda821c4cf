"""Draw the figures of docs/analysis.md and docs/evaluation.md and save their numbers (`make figures`).

Figures of schemes and of small models trained here need no downloads. Figures of real checkpoints are redrawn only if
their directories are given.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_posenc import analysis, plots
from hf_posenc.plots import evaluation as figures
from scripts.small_evaluations import (
    SCHEMES,
    evaluate_lengths,
    evaluate_passkeys,
    evaluate_similarity,
    train_copy_model,
)
from scripts.small_models import LENGTH, read_text, train

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
MAX_BYTES, DPI = 90_000, 100
NUMBERS = FIGURES / "numbers.txt"
LOG_LINES: list[str] = []
COMMON_WORDS = """\
house water red run king seven paper music tree happy street doctor bread green winter horse letter school
river stone blue walk queen five book song flower sad road nurse milk yellow summer dog word teacher sea iron black jump
prince nine page dance grass angry bridge soldier wine white spring cat story student lake gold brown swim child two"""
"""Words that are single tokens in any English vocabulary."""


def save_figure(name: str, figure: Any, *data: Any) -> None:
    """Save a figure as a small .png, and log its numbers."""
    save_small(figure, FIGURES / f"{name}.png")
    log(f"[{name}]", *map(str, data), "")


def save_small(figure: Any, path: Path, dpi: int = DPI, max_bytes: int = MAX_BYTES) -> None:
    """Save a figure as a .png, with at most 256 colors if it would be larger than `max_bytes` otherwise."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi)
    image = Image.open(buffer).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size > max_bytes:  # MAXCOVERAGE keeps the colors of rare values
        image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def log(*lines: str) -> None:
    LOG_LINES.extend(lines)
    print(*lines, sep="\n", flush=True)


def save_numbers() -> None:
    """Replace the sections of numbers.txt that were measured again, and keep the others."""
    lines = NUMBERS.read_text(encoding="utf-8").splitlines() if NUMBERS.exists() else []
    sections = {**split_sections(lines), **split_sections(LOG_LINES)}
    NUMBERS.write_text("\n".join("\n".join(section).strip() + "\n" for section in sections.values()), encoding="utf-8")


def split_sections(lines: list[str]) -> dict[str, list[str]]:
    """Sections of a log by name, each from its `[name]` line to the next one."""
    sections: dict[str, list[str]] = {}
    for line in lines:
        name = line if re.fullmatch(r"\[[a-z-]+\]", line) else next(reversed(sections), "")
        sections.setdefault(name, []).append(line)
    return sections


def rename(data: Any, name: str) -> Any:
    return dataclasses.replace(data, name=name)


def draw_schemes() -> None:
    model, plain = analysis.build_model, analysis.position_embeddings
    wide = plain(model("sinusoidal", hidden_size=512, num_heads=8), 128)
    save_figure("encoding", plots.position_embeddings(wide), wide)
    save_figure("movement", plots.feature_ranges(wide), wide)
    buckets = {"type": "deberta", "buckets": 16, "max_distance": 64}
    kinds = {"t5": "t5", "shaw": "shaw, clipped at 16", "deberta": "deberta, 16 buckets"}
    tables = [
        analysis.relative_buckets(model(buckets if kind == "deberta" else kind, causal=False), 64) for kind in kinds
    ]
    rows = [rename(data, name) for data, name in zip(tables, kinds.values(), strict=True)]
    save_figure("relative", plots.relative_buckets(*rows), *rows)
    for scheme in ("alibi", "sandwich"):
        bias = analysis.bias_by_distance(model(scheme, num_heads=8), 128)
        save_figure(f"bias-{scheme}", plots.bias_by_distance(bias), bias)
    slow = rename(analysis.rotary_decay(model({"type": "rope", "theta": 500000.0}, num_heads=1)), "rope, theta 500000")
    decays = [analysis.rotary_decay(model(scheme, num_heads=1)) for scheme in ("rope", "xpos")]
    save_figure("decay", plots.rotary_decay(*decays, slow), *decays, slow)
    mixes = [analysis.separability(model("sinusoidal", hidden_size=width)) for width in (64, 256)]
    apart = analysis.separability(model("sinusoidal"), unmixed=True)
    save_figure("separation-sinusoids", plots.separability(*mixes, apart), *mixes, apart)


def draw_small_models(steps: int) -> None:
    text, words = read_text()
    models, losses = {}, []
    for mix in ("add", "concat", "attention"):
        models[mix], loss = train({"type": "learned", "mix": mix}, text, steps)
        losses.append(f"mix {mix}: loss {loss:.3f} after {steps} steps")
    mixes = [analysis.separability(model) for model in models.values()]
    mixes.append(analysis.separability(models["add"], unmixed=True))
    save_figure("separation-trained", plots.separability(*mixes), *mixes, "; ".join(losses))
    common = [token for token, word in enumerate(words) if word.isalpha()][:128]
    cloud = analysis.token_clusters(models["add"], common, labels=[words[token] for token in common])
    cloud = rename(cloud, "small GPT-2, add")
    save_figure("clouds", plots.token_clusters(cloud), cloud)
    table = rename(analysis.position_embeddings(models["add"], LENGTH), "learned by a small GPT-2")
    save_figure("movement-learned", plots.feature_ranges(table), table)
    draw_small_rope_model(text, steps)


def draw_small_rope_model(text: torch.Tensor, steps: int) -> None:
    rope, _ = train("rope", text, steps)
    ids = text[: 16 * LENGTH].view(16, LENGTH)
    used = analysis.rotary_frequencies(rope, ids, "small GPT-2, rope")
    save_figure("frequencies", plots.rotary_frequencies(used), used)
    before = analysis.attention_by_distance(rope, ids, "small GPT-2, rope")
    after = analysis.attention_by_distance(with_scheme(rope, "alibi"), ids, "alibi, not trained")
    save_figure("attention", plots.attention_by_distance(before, after), before, after)


def with_scheme(model: Any, scheme: str) -> Any:
    """Build the same model with another scheme; neither scheme may have parameters."""
    config = copy.deepcopy(model.config)
    config.position_scheme = scheme
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(model.state_dict())
    return other.eval()


def draw_llama(directory: str, name: str, data: Path) -> None:
    model, ids = analysis.load_model(directory), analysis.tokenize_file(directory, data, 256, 16)
    slower = analysis.load_model(directory, {"type": "rope", "theta": 500000.0})
    used = [
        analysis.rotary_frequencies(model, ids, name),
        analysis.rotary_frequencies(slower, ids, "theta 500,000, not trained"),
    ]
    save_figure("frequencies-llama", plots.rotary_frequencies(*used), *used)
    before = analysis.attention_by_distance(model, ids, name)
    changed = analysis.load_model(directory, "alibi")
    after = analysis.attention_by_distance(changed, ids, "alibi, not trained")
    save_figure("attention-llama", plots.attention_by_distance(before, after), before, after)


def draw_bert(directory: str, name: str) -> None:
    model = analysis.load_model(directory)
    first, table = (rename(analysis.position_embeddings(model, length), name) for length in (128, 512))
    save_figure("encoding-bert", plots.position_embeddings(first), first)
    sinusoids = analysis.position_embeddings(
        analysis.build_model("sinusoidal", hidden_size=table.table.shape[1], num_heads=12), 512
    )
    save_figure("movement-bert", plots.feature_ranges(table, sinusoids), table, sinusoids)
    mixes = [rename(analysis.separability(model, unmixed=side), name) for side in (False, True)]
    save_figure("separation-bert", plots.separability(*mixes), *mixes)
    reader = AutoTokenizer.from_pretrained(directory)
    common = reader.convert_tokens_to_ids(COMMON_WORDS.split())
    cloud = rename(analysis.token_clusters(model, common, labels=COMMON_WORDS.split()), name)
    save_figure("clouds-bert", plots.token_clusters(cloud), cloud)


def save_evaluation(name: str, figure: Any, data: Any = None) -> None:
    save_figure(f"eval-{name}", figure, *([] if data is None else [data]))


def draw_copy_models(steps: int) -> None:
    models = {}
    for name, scheme in SCHEMES.items():
        models[name], _ = train_copy_model(scheme, steps)
    results = evaluate_passkeys(models)
    save_evaluation("passkey", figures.passkey_figure(results), results)
    save_evaluation("passkey-preference", figures.passkey_figure(results, "preference"))


def draw_llama_evaluations(directory: str, data: Path) -> None:
    by_length, by_order = evaluate_lengths(directory, data, 24_576)
    save_evaluation("length-curve", figures.length_curve_figure(by_length), by_length)
    save_evaluation("positions", figures.position_figure(by_length))
    save_evaluation("order", figures.order_figure(by_order), by_order)


def draw_bert_evaluations(directory: str, data: Path) -> None:
    similarity = evaluate_similarity(directory, data, 3_072)
    save_evaluation("similarity", figures.similarity_figure(similarity), similarity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each small model")
    parser.add_argument("--copy-steps", type=int, default=600, help="training steps of each copy model")
    parser.add_argument("--llama", help="directory of a LLaMA checkpoint")
    parser.add_argument("--llama-name", help="its label in the figures")
    parser.add_argument("--bert", help="directory of a BERT checkpoint")
    parser.add_argument("--bert-name", help="its label in the figures")
    parser.add_argument("--data", type=Path, help="text file for the checkpoints")
    args = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    FIGURES.mkdir(exist_ok=True)
    draw_schemes()
    draw_small_models(args.steps)
    draw_copy_models(args.copy_steps)
    if args.llama and args.data:
        draw_llama(args.llama, args.llama_name or Path(args.llama).name, args.data)
        draw_llama_evaluations(args.llama, args.data)
    else:
        print("No --llama and --data given: keeping the figures of the LLaMA checkpoint.")
    if args.bert:
        draw_bert(args.bert, args.bert_name or Path(args.bert).name)
        if args.data:
            draw_bert_evaluations(args.bert, args.data)
    else:
        print("No --bert given: keeping the figures of the BERT checkpoint.")
    save_numbers()


if __name__ == "__main__":
    main()
