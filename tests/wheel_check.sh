#!/usr/bin/env bash
# wheel_check.sh PYTHON...: checks the metadata of dist/*, installs the wheel into an empty environment of
# each Python, and runs commands there. With FULL=1 torch and DeepSpeed are installed too, and reft is
# imported with them; without it, only what needs neither is run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheel=$(realpath dist/*.whl)
python=${1:?usage: tests/wheel_check.sh PYTHON...}
"$python" -m venv "$work/twine"
"$work/twine/bin/pip" install -q twine
"$work/twine/bin/twine" check --strict dist/*
for python in "$@"; do
  env=$work/$(basename "$(dirname "$(dirname "$python")")")-$(basename "$python")
  "$python" -m venv "$env"
  if [ "${FULL:-}" = 1 ]; then
    "$env/bin/pip" install -q "$wheel"
  else
    "$env/bin/pip" install -q msgpack numpy psutil pydantic rich typer xxhash
    "$env/bin/pip" install -q --no-deps "$wheel"
  fi
  cd "$work"
  echo '{"train_micro_batch_size_per_gpu": 1, "reft": {"enabled": true}}' >ds_config.json
  "$env/bin/reft" --version
  "$env/bin/reft" config --explain >/dev/null
  "$env/bin/reft" plan ds_config.json --model llama2-1.3b --nodes 4 --micro-batches 4 --json >/dev/null
  "$env/bin/reft" clean --dry-run --memory-dir "$work"
  if [ "${FULL:-}" = 1 ]; then
    "$env/bin/reft" config --check ds_config.json
    "$env/bin/python" -c "import deepspeed, reft; print(reft.resumable)"
  fi
  cd - >/dev/null
  echo "$("$python" --version): the wheel works$([ "${FULL:-}" = 1 ] || echo " (without torch and DeepSpeed)")"
done
