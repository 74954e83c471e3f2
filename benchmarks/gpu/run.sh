#!/usr/bin/env bash
# grpofit's checks on a CUDA card, at most 8 minutes; without one the same on tiny models, on the CPU.
#
#   benchmarks/gpu/run.sh [--only SECTION ...] [--cpu-dry] [--out FOLDER]
#   benchmarks/gpu/run.sh --fetch        put wheels for a machine without network into .whl/, then copy the folder there
#
# Python: $PYTHON, else .venv, else python3. It must have torch; what else is missing comes from .whl/, or from PyPI.
# Nothing of that environment is changed: missing packages go to a folder of their own.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

# With all they need, except torch and what comes with torch or transformers.
needed=(transformers tokenizers safetensors numpy pydantic pydantic-core typing-inspection annotated-types pyyaml typer
        rich jinja2 pyarrow)
compared=('trl>=1.16,<1.17' accelerate datasets 'multiprocess<0.70.20' 'dill<0.4.2' xxhash pandas liger-kernel)
fetched=(pydantic pydantic-core typing-inspection annotated-types 'trl>=1.16,<1.17' datasets 'multiprocess<0.70.20'
         'dill<0.4.2' xxhash liger-kernel)

if [[ ${1:-} == --fetch ]]; then
  mkdir -p .whl
  # For CPython 3.12 on x86-64 Linux unless told otherwise. What comes with most installations of torch stays out:
  # pyarrow alone is half of what some machines take along.
  exec python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .whl "${fetched[@]}"
fi

python=
for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3; do
  if command -v "$candidate" > /dev/null && "$candidate" -c 'import torch' 2> /dev/null; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  echo "no Python with torch: looked at \$PYTHON, .venv/bin/python and python3"
  echo "  fix  make install   (from PyPI it is the CUDA build), or PYTHON=/path/to/python $0"
  exit 2
fi
echo "python: $python, $("$python" --version 2>&1)"

# Those of the requirements given whose package is not installed, as Python sees it with PYTHONPATH.
missing_of() {
  "$python" - "$@" << 'PY'
import importlib.metadata, re, sys
for wanted in sys.argv[1:]:
    try:
        importlib.metadata.version(re.split("[<>=]", wanted)[0])
    except importlib.metadata.PackageNotFoundError:
        print(wanted)
PY
}

site=${TMPDIR:-/tmp}/grpofit-gpu-site-$(id -u)
export PYTHONPATH=$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}
cuda=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))')
wanted=("${needed[@]}")
# What TRL needs is worth an installation only where it can be measured.
[[ $cuda == 1 ]] && wanted+=("${compared[@]}")
mapfile -t missing < <(missing_of "${wanted[@]}")
if (( ${#missing[@]} )); then
  echo "installing ${missing[*]} into $site"
  from=(--retries 0 --timeout 5)
  compgen -G '.whl/*.whl' > /dev/null && from=(--no-index --find-links .whl)
  # One at a time, so that one that cannot be had leaves the others; --no-deps, so that torch stays as it is.
  for one in "${missing[@]}"; do
    timeout 60 "$python" -m pip install -q --no-deps --no-compile "${from[@]}" --target "$site" "$one" 2>&1 | tail -1
  done
fi
mapfile -t missing < <(missing_of "${needed[@]}")
if (( ${#missing[@]} )); then
  echo "cannot run without: ${missing[*]}"
  echo "  fix  on a machine with network: $0 --fetch; then bring .whl/ here"
  exit 2
fi

exec "$python" benchmarks/gpu/checkup.py "$@"
