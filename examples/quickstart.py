"""A tour without downloads: build a tiny GPT-2, give it three other position schemes, save, reload and generate."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from transformers.utils import logging

import hf_posenc

CONTEXT, LONGER = 64, 400


def main(directory: Path) -> None:
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=3, n_head=4, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "stock")
    stock = AutoModelForCausalLM.from_pretrained(directory / "stock")
    text = torch.randint(256, (1, LONGER))
    print(f"A GPT-2 with {stock.num_parameters():,} parameters and {CONTEXT} learned positions.")
    try:
        stock(text)
    except IndexError:
        print(f"  stock    {LONGER} tokens: IndexError, its position table has {CONTEXT} rows")

    for scheme in ("rope", "alibi", "t5"):
        model = AutoModelForCausalLM.from_pretrained(directory / "stock", position_scheme=scheme)
        model.save_pretrained(directory / scheme)
        reloaded = AutoModelForCausalLM.from_pretrained(directory / scheme)
        with torch.no_grad():
            logits = reloaded(text).logits
            identical = torch.equal(logits, model(text).logits)
        generated = reloaded.generate(text[:, :CONTEXT], max_new_tokens=40, do_sample=False)
        print(
            f"  {scheme:<8} {LONGER} tokens: logits {tuple(logits.shape)}, "
            f"{'identical' if identical else 'DIFFERENT'} after saving and reloading; "
            f"generated up to position {generated.shape[1]}"
        )

    with torch.no_grad():
        before = stock(text[:, :CONTEXT]).logits
        hf_posenc.retrofit(stock, "alibi")
        hf_posenc.restore(stock)
        unchanged = torch.equal(stock(text[:, :CONTEXT]).logits, before)
    print(f"  retrofit and restore of the live model: logits {'unchanged' if unchanged else 'CHANGED'}")
    print(f"Saved to {directory}/. After `import hf_posenc`, AutoModelForCausalLM.from_pretrained loads any of them.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="where the models are saved")
    args = parser.parse_args()
    logging.disable_progress_bar()
    main(args.directory)
