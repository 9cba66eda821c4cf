"""Use the installed package from an empty directory, with only its required dependencies: `package_smoke.py CHECKOUT`.

Nothing may be imported from CHECKOUT.
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


def run_cli(*arguments: str, exit_code: int = 0) -> str:
    """Run the installed `hf-posenc` script."""
    script = Path(sys.executable).parent / "hf-posenc"
    result = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == exit_code, (arguments, result.returncode, result.stdout, result.stderr)
    return result.stdout + result.stderr


def check_installation(checkout: Path) -> None:
    import hf_posenc

    package = Path(hf_posenc.__file__).resolve().parent
    assert package.is_relative_to(Path(sys.prefix).resolve()), package
    assert not package.is_relative_to(checkout.resolve()), package
    assert "torch" not in sys.modules, "`import hf_posenc` must not import torch"
    assert (package / "py.typed").exists()
    assert (package / "patches" / "gpt2.py").exists()
    assert not (package / "patches").is_symlink()
    assert metadata.version("hf_posenc") == hf_posenc.__version__
    assert not Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "patches").exists()


def main() -> None:
    check_installation(Path(sys.argv[1]))
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    import hf_posenc

    help_text, listed = run_cli("--help"), json.loads(run_cli("schemes", "--json"))
    assert all(name in help_text for name in ("convert", "eval", "inspect", "plot", "push", "schemes", "train"))
    assert set(listed) == set(hf_posenc.list_schemes())

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained("stock")
    run_cli("convert", "stock", "--scheme", '["rope", "t5"]', "--out", "variant")
    assert "t5" in run_cli("inspect", "variant")
    assert "[train]" in run_cli("train", "--model", "stock", "--scheme", "rope", "--data", "text.txt",
                                "--train-length", "8", "--output-dir", "out", exit_code=2)  # fmt: skip

    model = AutoModelForCausalLM.from_pretrained("variant").eval()
    ids = model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert model.config.model_type == "posenc_gpt2"
    assert ids.shape[1] > config.n_positions
    fresh_process = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=300)
    assert fresh_process.returncode == 0, fresh_process.stderr
    assert fresh_process.stdout.strip().endswith(str(ids.tolist())), fresh_process.stdout


if __name__ == "__main__":
    main()
