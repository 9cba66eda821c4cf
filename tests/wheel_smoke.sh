#!/bin/sh
# Build the wheel and use it from outside of the checkout: a scheme, the patches, and the type marker must be in it.
set -eu
python=$1 venv=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$venv/bin/python" -m build --quiet --wheel --outdir "$scratch" .
"$venv/bin/python" -m zipfile -e "$scratch"/*.whl "$scratch/site"
cd "$scratch"
HF_HUB_OFFLINE=1 PYTHONPATH="$scratch/site" "$OLDPWD/$venv/bin/python" - <<'PY'
import pathlib, hf_posenc
home = pathlib.Path(hf_posenc.__file__).parent
assert "site" in str(home), home
assert (home / "py.typed").exists() and (home / "patches" / "gpt2.py").exists() and not (home / "patches").is_symlink()
from transformers import GPT2Config, GPT2Model
model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, position_scheme=["rope", "t5"]))
print("wheel:", type(model).__name__, sorted(hf_posenc.schemes()))
PY
