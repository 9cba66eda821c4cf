"""Draw the README's figure, and write the numbers that choosing.md quotes (`make figures`; a minute).

A small GPT-2 with learned positions is trained from scratch; copies of it are changed to other schemes and brought
back by the recommended recipe, but for fitting: the model as it was for a teacher, and a faster rate for what is new.
None of them sees more than 64 tokens at a time. Then all read text that none of them has seen, in longer and longer
windows.
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
from hf_posenc.training.rates import parameter_groups
from hf_posenc.training.recipe import RECOMMENDED
from hf_posenc.training.teacher import Teacher, Weights, recorded
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


def converted(stock: Any, scheme: Any, text: torch.Tensor) -> Any:
    """A copy under another scheme, after a third of the steps that the stock model had."""
    torch.manual_seed(1)
    model, teacher, weights = copy.deepcopy(stock), Teacher(copy.deepcopy(stock)), Weights()
    hf_posenc.retrofit(model, scheme).train()
    groups = parameter_groups(model, RATE, RECOMMENDED.position_rate * RATE)
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=RECOVERY_STEPS)
    for step in range(RECOVERY_STEPS):
        inputs = {"input_ids": batch(text, ROWS)}
        lesson = teacher.look_at(inputs)
        with recorded(list(model.transformer.h)) as states:
            logits = model(**inputs).logits
        sum(lesson.parts(weights, logits, states[1:], None, 1 - step / RECOVERY_STEPS).values()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def batch(text: torch.Tensor, rows: int) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (rows,))
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def drawn(found: Any) -> Any:
    """One line a model, named at its end; the stock model's ends in a cross."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, colour) in enumerate(zip((STOCK, *DRAWN), COLORS, strict=False)):
        known = [(one.length, one.perplexity.value) for one in found.perplexity if one.model == name and one.perplexity]
        axes.plot(*zip(*known, strict=True), color=colour, marker="o^sD"[number], zorder=3 if name == STOCK else 2)
        if name == STOCK:
            axes.plot(*known[-1], "x", color=colour, markersize=15, markeredgewidth=3)
            place = {"xytext": (-8, -30), "ha": "right"}
        else:
            place = {"xytext": (8, 0), "va": "center"}
        label = "GPT-2 as it was:\nends with its table" if name == STOCK else name
        axes.annotate(label, known[-1], textcoords="offset points", color=colour, weight="bold", **place)
    lengths = sorted({one.length for one in found.perplexity})
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
    models |= {name: converted(stock, scheme, text[:cut]) for name, scheme in SCHEMES.items()}
    models["alibi, no training"] = hf_posenc.retrofit(copy.deepcopy(stock), "alibi")
    lengths = ["0.5x", "1x", "2x", "4x", "8x"]
    found = hf_posenc.evaluate(models, text[cut:], lengths=lengths, task="causal-lm", progress=False)
    print(found)
    save_small(drawn(found), FIGURES / "length-curve.png")
    (FIGURES / "length-curve.txt").write_text(f"{found}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
