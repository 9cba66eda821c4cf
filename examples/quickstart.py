"""The whole way, offline: make a tiny GPT-2, change its positions three ways, save, load and generate."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from transformers.utils import logging

import hf_posenc

TRAINED_LENGTH, LONGER = 64, 400


def main(directory: Path) -> None:
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=3, n_head=4, n_positions=TRAINED_LENGTH, bos_token_id=None, eos_token_id=None
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "stock")
    stock = AutoModelForCausalLM.from_pretrained(directory / "stock")
    text = torch.randint(256, (1, LONGER))
    print(f"A GPT-2 with {stock.num_parameters():,} parameters and a table of {TRAINED_LENGTH} positions.")
    try:
        stock(text)
    except IndexError:
        print(f"  stock    given {LONGER} tokens: IndexError, the table ends at {TRAINED_LENGTH}")

    for scheme in ("rope", "alibi", "t5"):
        model = AutoModelForCausalLM.from_pretrained(directory / "stock", position_scheme=scheme)
        model.save_pretrained(directory / scheme)
        loaded = AutoModelForCausalLM.from_pretrained(directory / scheme)
        with torch.no_grad():
            logits = loaded(text).logits
            kept = torch.equal(logits, model(text).logits)
        written = loaded.generate(text[:, :TRAINED_LENGTH], max_new_tokens=40, do_sample=False)
        print(
            f"  {scheme:<8} given {LONGER} tokens: {tuple(logits.shape)} logits; saved and loaded "
            f"{'to the bit' if kept else 'WITH A DIFFERENCE'}; generated up to position {written.shape[1]}"
        )

    before = stock(text[:, :TRAINED_LENGTH]).logits
    hf_posenc.retrofit(stock, "alibi")
    hf_posenc.restore(stock)
    same = torch.equal(stock(text[:, :TRAINED_LENGTH]).logits, before)
    print(f"  retrofit and restore of the live model: logits {'as before' if same else 'CHANGED'}")
    print(
        f"The models lie in {directory}/: load one with AutoModelForCausalLM.from_pretrained after `import hf_posenc`."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="where the models are written")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    main(arguments.directory)
