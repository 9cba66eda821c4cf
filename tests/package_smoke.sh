#!/bin/sh
# Build the sdist and a wheel from it, install each into an empty environment and use it outside of the checkout.
# Usage, from the root: tests/package_smoke.sh PYTHON VENV CONSTRAINTS. VENV must have `build`; it is not changed.
set -eu
python=$1 builder=$2/bin/python constraints=$(realpath "$3") root=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH PYTHONHOME

"$builder" -m build --quiet --outdir "$scratch/dist" "$root"
"$builder" "$root/tests/package_contents.py" "$root" "$scratch/dist"

# torch first, as in `make install`; then the package with its required dependencies and no extras.
"$python" -m venv "$scratch/empty"
cp "$root/tests/package_smoke.py" "$scratch"
empty="$scratch/empty/bin/python"
"$empty" -m pip install --quiet --requirement "$constraints"
cd "$scratch"
for package in dist/*.whl dist/*.tar.gz; do
    # Both share one environment: only the package itself is replaced.
    "$empty" -m pip uninstall --quiet --yes hf_posenc 2>/dev/null
    "$empty" -m pip install --quiet --constraint "$constraints" "$package"
    "$empty" -m pip check --quiet
    rm -rf work && mkdir work
    (cd work && HF_HUB_OFFLINE=1 "$empty" ../package_smoke.py "$root")
    echo "$(basename "$package"): installs, converts, loads and generates outside of the checkout"
done
