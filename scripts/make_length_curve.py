"""Draw the README's figure and write the numbers that choosing.md quotes (`make figures`; about a minute).

Train a small GPT-2 with learned positions from scratch, convert copies of it to other schemes, and fine-tune them with
the recommended recipe without its warm start: distillation from the original, and a higher learning rate for the
scheme's parameters. No model sees more than 64 tokens at a time in training. Then evaluate all on held-out text in
longer and longer windows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers.utils import logging

import hf_posenc
from hf_posenc.plots.style import COLORS
from hf_posenc.training import RECIPES, LossWeights, Teacher, parameter_groups, record_hidden_states
from scripts.make_figures import save_small
from scripts.small_models import LENGTH, RATE, ROWS, read_text, train

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
STEPS, RECOVERY_STEPS, HELD_OUT = 600, 200, 0.2
STOCK = "stock"
SCHEMES: dict[str, Any] = {
    "alibi": "alibi",
    "rope": "rope",
    "t5": {"type": "t5", "max_distance": LENGTH // 2},
    "t5, buckets for 128": "t5",
    "none": "none",
}
DRAWN = ("alibi", "t5", "rope")


def convert_and_train(stock: Any, scheme: Any, text: torch.Tensor) -> Any:
    """Convert a copy to another scheme and train it for a third of the steps of the original."""
    torch.manual_seed(1)
    model, teacher, weights = copy.deepcopy(stock), Teacher(copy.deepcopy(stock)), LossWeights()
    hf_posenc.retrofit(model, scheme).train()
    groups = parameter_groups(model, RATE, RECIPES["recommended"].position_lr_multiplier * RATE)
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=RECOVERY_STEPS)
    for step in range(RECOVERY_STEPS):
        inputs = {"input_ids": sample_batch(text, ROWS)}
        target = teacher.forward(inputs)
        with record_hidden_states(list(model.transformer.h)) as hidden_states:
            logits = model(**inputs).logits
        terms = target.losses(weights, logits, hidden_states, hidden_scale=1 - step / RECOVERY_STEPS)
        sum(terms.values()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def sample_batch(text: torch.Tensor, rows: int) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (rows,))
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def draw(results: Any) -> Any:
    """Draw one labeled line per model; a cross marks where the stock model ends."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, color) in enumerate(zip((STOCK, *DRAWN), COLORS, strict=False)):
        rows = [row for row in results.perplexity if row.model == name and row.perplexity]
        points = [(row.length, row.perplexity.value) for row in rows]
        axes.plot(*zip(*points, strict=True), color=color, marker="o^sD"[number], zorder=3 if name == STOCK else 2)
        if name == STOCK:
            axes.plot(*points[-1], "x", color=color, markersize=15, markeredgewidth=3)
            offset = {"xytext": (-8, -30), "ha": "right"}
        else:
            offset = {"xytext": (8, 0), "va": "center"}
        label = "stock GPT-2:\nends with its table" if name == STOCK else name
        axes.annotate(label, points[-1], textcoords="offset points", color=color, weight="bold", **offset)
    lengths = sorted({row.length for row in results.perplexity})
    axes.set(xscale="log", xlabel="tokens read", ylabel="perplexity", ylim=(20, 30))
    axes.set_xticks(lengths, [f"{length} ({length / LENGTH:g}x)" for length in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] * 0.9, lengths[-1] * 1.35)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    text, _ = read_text()
    cut = int(len(text) * (1 - HELD_OUT))
    stock, _ = train(None, text[:cut], STEPS)
    models = {STOCK: stock}
    models |= {name: convert_and_train(stock, scheme, text[:cut]) for name, scheme in SCHEMES.items()}
    models["alibi, not trained"] = hf_posenc.retrofit(copy.deepcopy(stock), "alibi")
    lengths = ["0.5x", "1x", "2x", "4x", "8x"]
    results = hf_posenc.evaluate(models, text[cut:], lengths=lengths, task="causal-lm", progress=False)
    print(results)
    save_small(draw(results), FIGURES / "length-curve.png")
    (FIGURES / "length-curve.txt").write_text(f"{results}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
