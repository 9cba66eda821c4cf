"""Use the installed package from an empty directory, with nothing there but what it depends on itself.

`package_smoke.py CHECKOUT`: from there nothing may be imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoConfig

assert "hf_posenc" not in sys.modules
model = AutoModelForCausalLM.from_pretrained("variant", trust_remote_code=True).eval()
again = model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=60, do_sample=False, pad_token_id=0)
print(type(model).__name__, model.config.position_scheme, again.tolist())
"""


def command(*words: str, exits: int = 0) -> str:
    """As a shell finds it: the script that the installation made."""
    script = Path(sys.executable).parent / "hf-posenc"
    done = subprocess.run([script, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == exits, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def check_place(checkout: Path) -> None:
    import hf_posenc

    home = Path(hf_posenc.__file__).resolve().parent
    assert home.is_relative_to(Path(sys.prefix).resolve()), home
    assert not home.is_relative_to(checkout.resolve()), home
    assert "torch" not in sys.modules, "`import hf_posenc` must cost next to nothing"
    assert (home / "py.typed").exists()
    assert (home / "patches" / "gpt2.py").exists()
    assert not (home / "patches").is_symlink()
    assert metadata.version("hf_posenc") == hf_posenc.__version__
    assert not Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "patches").exists()


def main() -> None:
    check_place(Path(sys.argv[1]))
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    import hf_posenc

    helped, listed = command("--help"), json.loads(command("schemes", "--json"))
    assert all(name in helped for name in ("convert", "eval", "inspect", "plot", "push", "schemes", "train"))
    assert set(listed) == set(hf_posenc.list_schemes())

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained("stock")
    command("convert", "stock", "--scheme", '["rope", "t5"]', "--out", "variant")
    assert "t5" in command("inspect", "variant")
    assert "[train]" in command("train", "--model", "stock", "--scheme", "rope", "--data", "text.txt",
                                "--train-length", "8", "--output-dir", "out", exits=2)  # fmt: skip

    model = AutoModelForCausalLM.from_pretrained("variant").eval()
    ids = model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert model.config.model_type == "posenc_gpt2"
    assert ids.shape[1] > config.n_positions
    elsewhere = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=300)
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert elsewhere.stdout.strip().endswith(str(ids.tolist())), elsewhere.stdout


if __name__ == "__main__":
    main()
