#!/bin/bash
# Fills FOLDER with what a machine with torch for its GPU, CuPy and Python 3.12, but without a network, lacks for reft.
#   bash benchmarks/gpu_wheels.sh [FOLDER=build/gpu-wheels] [PYTHON=.venv/bin/python]
# There: python3 -m pip install --no-index --no-deps --target /tmp/site FOLDER/*.whl; cp -r FOLDER/so/. .;
# PYTHONPATH=/tmp/site:$PWD make gpu GPU_PYTHON=python3
# PYTHON has torch and pip (make venv made it); it only builds DeepSpeed's pure wheel, for any Python 3.
set -euo pipefail
folder=${1:-build/gpu-wheels} python=${2:-.venv/bin/python}
rm -rf "$folder"; mkdir -p "$folder"
# Versions of constraints.txt and of the checkout's own environment.
deepspeed=$(sed -n 's/^deepspeed==//p' constraints.txt)
of() { "$python" -m pip list --format=freeze 2>/dev/null | sed -n "s/^$1==//Ip"; }
DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$folder" "deepspeed==$deepspeed"
platforms=$(for n in 28 27 24 17; do printf ' --platform manylinux_2_%s_x86_64' $n; done)
# Not here: what the machine has already (msgpack, xxhash, typer, rich, psutil, einops, py-cpuinfo, tqdm, ninja, pytest*, hypothesis).
for name in pydantic pydantic_core annotated-types typing-inspection typing_extensions hjson; do
  version=$(of "$name"); [ -n "$version" ] || version=$(of "${name//_/-}"); [ -n "$version" ] || version=$(of "${name//-/_}")
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
    --abi none $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" "$name==$version"
done
# reft's own C++ needs no Python and no driver: it is loaded with ctypes. Carried, so that nothing is compiled there.
mkdir -p "$folder/so/reft/memory" "$folder/so/reft/protect"
c++ -O3 -g0 -fPIC -shared reft/memory/stream.cpp -o "$folder/so/reft/memory/_stream.so"
c++ -O3 -g0 -fPIC -shared reft/protect/packets.cpp -o "$folder/so/reft/protect/_packets.so"
du -sh "$folder"; ls -1 "$folder"
