#!/usr/bin/env bash
# The suite with each requirement of setup.cfg at the lowest version that it admits (Python 3.11).
# Usage: tests/floors.sh [options of pytest]
# Downloads several GB: the registry has older versions of torch for CUDA only. TMPDIR says where.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
extras=test,accelerate,lightning,hf

python3 tests/floors.py ${extras//,/ } > "$scratch/floors"
python3 -m venv "$scratch/venv"
. "$scratch/venv/bin/activate"
PIP_CONSTRAINT="$scratch/floors" pip install --quiet -e ".[$extras]"
pip list
pytest -n 2 --dist loadfile "$@"
