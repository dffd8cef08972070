#!/usr/bin/env bash
# benchmarks/gpu_check.sh [--device cuda|cpu] [--tiny]: correctness and speed on one GPU, in under seven minutes.
#
# PYTHON: the interpreter (default: .venv/bin/python where that sees the device, else python3); needs torch and numpy.
# OUT: folder for the rows (default: benchmarks/results; with --tiny nowhere). COMMIT: for the rows, where git is absent.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cuda
previous=
for argument in "$@"; do
    case $previous$argument in
        --device*cpu) device=cpu ;;
    esac
    previous=$argument
done

has_device() {
    "$1" -c "import sys, torch; sys.exit('$device' != 'cpu' and not torch.cuda.is_available())" 2>/dev/null
}

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    if [[ -x .venv/bin/python ]] && has_device .venv/bin/python; then
        PYTHON=.venv/bin/python
    fi
fi
if ! has_device "$PYTHON"; then
    echo "$PYTHON has no torch that sees a $device device; set PYTHON, or rehearse with --device cpu --tiny" >&2
    exit 2
fi

# NVML: a look whether CUDA is there must not keep the processes of the sections from using it.
export PYTORCH_NVML_BASED_CUDA_CHECK=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m benchmarks.gpu_check "$@"
