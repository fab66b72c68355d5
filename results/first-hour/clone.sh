#!/usr/bin/env bash
# From nothing to the first table: the README's commands, each with its seconds and those of the processor.
#
#   bash results/first-hour/clone.sh REPOSITORY > results/first-hour/clone.txt
#
# The database is a new one. Packages come from the index that pip uses, or from its cache.
set -euo pipefail
repository=${1:?usage: clone.sh REPOSITORY}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export COLUMNS=80 AUTOTAX_DB=$folder/autotax.db TIMEFORMAT='    %1R s, processor %1U + %1S s'
count=0

step() {
  count=$((count + 1))
  local told=${*//$folder/...}
  echo "$count. ${told//$repository/REPOSITORY}"
  { time "$@" >"$folder/out" 2>"$folder/err"; } 2>&1
}

SECONDS=0
step git clone --quiet "$repository" "$folder/autotax"
cd "$folder/autotax"
step make .venv/ready
step .venv/bin/autotax tune all-gather-gemm --m 64 --n 96 --k 64 --dtype fp32 --trials 4
sed "s/ *$//" "$folder/out"
tail -n 1 "$folder/err" | sed "s#$folder#...#"
echo "$count commands, $SECONDS s in all; load average: $(cut -d' ' -f1 /proc/loadavg) on $(nproc) cores"
