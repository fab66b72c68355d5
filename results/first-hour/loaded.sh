#!/usr/bin/env bash
# Runs `make test` many times in a row beside a busy loop on each core: exit code, seconds and counts of each run.
#
#   bash results/first-hour/loaded.sh [RUNS] > results/first-hour/loaded.txt
#
# The environment is made before. What a run printed is kept in a folder that is named at the end, if one failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
make .venv/ready >/dev/null || exit
folder=$(mktemp -d)
loops=()
trap 'kill "${loops[@]}"' EXIT
for core in $(seq 0 $(($(nproc) - 1))); do
  taskset -c "$core" python3 -c 'while True: pass' >/dev/null &
  loops+=($!)
done
failed=0
for run in $(seq "${1:-10}"); do
  SECONDS=0
  make test >"$folder/$run" 2>&1
  ended=$?
  [ "$ended" = 0 ] || failed=$((failed + 1))
  echo "run $run: exit code $ended, $SECONDS s, $(grep -E '[0-9]+ (passed|failed)' "$folder/$run" | tr '\n' ';')"
done
if [ "$failed" = 0 ]; then rm -r "$folder"; else echo "$failed runs failed: see $folder" && exit 1; fi
