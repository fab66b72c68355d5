#!/usr/bin/env bash
# Three journeys of a newcomer in an environment that exists: a first table, a first kernel, a served layer. Seconds of each command.
#
#   bash results/first-hour/journeys.sh > results/first-hour/journeys.txt                           # two CPU ranks
#   CUDA_VISIBLE_DEVICES=0 bash results/first-hour/journeys.sh > results/first-hour/journeys-gpu.txt  # one GPU
#
# PYTHON names the interpreter, by default that of `make .venv/ready`. The database is a new one.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export COLUMNS=80 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} AUTOTAX_DB=$folder/autotax.db TIMEFORMAT='    %1R s, processor %1U + %1S s'
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  where=$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader) sizes="--n 7168 --k 8192"
  ranks=$("$python" -c 'import torch; print(torch.cuda.device_count())')
else
  where="CPU ranks" ranks=2 sizes="--n 96 --k 64 --dtype fp32"
fi
cd "$folder"
failed=0

step() {
  [ -z "$skipped" ] || return 0
  local told=${*//$root\//}
  echo "${told//$python/python}"
  { time timeout --foreground -k 5 "${LIMIT:-120}" "$@" >out 2>err; } 2>&1 || { failed=1; echo "    exit code not 0: $(grep -v "^=*$" err | tail -n 1)"; }
}

journey() {  # JOURNEYS, for instance "1 3", leaves others out
  echo "$1"
  skipped=1
  [[ " ${JOURNEYS:-1 2 3} " == *" ${1%%.*} "* ]] && skipped=
  SECONDS=0
  : >out
}

echo "$ranks x $where; load average $(cut -d' ' -f1 /proc/loadavg) on $(nproc) cores"
journey "1. To the first table"
# shellcheck disable=SC2086
step "$python" -m autotax tune all-gather-gemm --m $((128 * ranks)) $sizes --trials 4
sed 's/ *$//; s/^/    | /; s/ *$//' out
journey "2. To the first kernel of one's own"
step "$python" -m autotax new operator my-sum
step "$python" -m autotax tune my-sum --n 512 --dtype fp32 --trials 2 --soak 2 --load my_sum.py
step "$python" -m autotax new variant my-push
step "$python" -m autotax tune all-gather-gemm --m 64 --n 96 --k 64 --dtype fp32 --variants my-push --trials 2 --soak 2 --load my_push.py
echo "    $SECONDS s in all"
journey "3. To a served layer, of the size of the first table"
step "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$root/examples/in_torch.py"
grep -E "AllGatherLinear.*m=$((128 * ranks)),|layer:|attention:" out | sed 's/^/    | /' | cut -c1-160
exit $failed
