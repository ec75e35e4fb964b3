#!/usr/bin/env bash
# How long a stranger takes from git clone to a script of their own that has lost a node and gone on, by the
# commands of docs/quickstart.md; ten of them, with git clone. The first argument is what to clone.
set -eu -o pipefail
source=$(realpath "${1:-$(git rev-parse --show-toplevel)}")
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
SECONDS=0

git clone -q "$source" "$directory/reft"
cd "$directory/reft"
make -s venv
export PATH="$PWD/.venv/bin:$PATH"
echo "installed after $SECONDS s"
cp examples/plain.py train.py
sed -n '/^```bash$/,/^```$/{/^```/!p}' docs/quickstart.md | sed 's#examples/plain.py#train.py#' > quickstart.sh
bash -u quickstart.sh
echo "a node was lost and the job has ended well after $SECONDS s"
