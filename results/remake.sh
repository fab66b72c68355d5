#!/usr/bin/env bash
# Makes the tables of a folder of results anew, on the machine that this runs on.
#
#   bash results/remake.sh FOLDER OUT [STEP ...]      for instance results/h200x4 /tmp/h200x4
#
# FOLDER holds flash-decode/shapes.toml and all-gather-gemm/shapes.toml; the shapes of the other operators, the same on
# every host, are in results/shapes. Where FOLDER holds none of an operator, name the steps of the others. The steps, in this order, put into OUT:
#
#   fd  ag            tuned.db: every trial with its samples; tune-fd.txt, tune-ag.txt: what was printed
#   fd-table ag-table flash-decode.json, all-gather-gemm.json; ladder.md, ladder.svg
#   page              report.html: all of that with plots
#   rs rs-table       the same of GEMM + Reduce-Scatter: tune-rs.txt, gemm-reduce-scatter.json
#   stack             tune-stack.txt: winners for the next two, where FOLDER holds runtime/shapes.toml
#   fused             fused-overhead.json, .txt: host time of torch's fused operators; async-tp.json, async-tp.txt, and with -train:
#                     an unchanged stack through torch.compile on NCCL, on torch's async tensor parallelism, on ours
#   block             llama.json, llama.txt: a Llama-style stack with both halves, forward, and forward and backward
#   fd-soak ag-soak   10,000 replays of each finalist with delayed ranks: soak-fd.txt, soak-ag.txt;
#   rs-soak           likewise soak-rs.txt
#   dm dm-table       decode merge and head gather: tune-dm.txt, decode-merge.json
#   dm-soak           likewise soak-dm.txt
#   kv kv-table       Flash Decode with 8-bit caches, sinks, windows, drafts on one GPU: tune-kv.txt, kv-cache.json
#   kv-soak           likewise soak-kv.txt
#   traces            traces.txt: where programs wait, for the lines of results/shapes/traces.txt; a timeline of each in traces
#
# A tuning that was ended goes on where it was. AUTOTAX: the command, `python cli.py` in a checkout that is not installed.
set -euo pipefail
folder=${1:?usage: remake.sh FOLDER OUT [STEP ...]} out=${2:?usage: remake.sh FOLDER OUT [STEP ...]}
shift 2
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(fd fd-table ag ag-table page fd-soak ag-soak)
read -ra autotax <<<"${AUTOTAX:-autotax}"
export AUTOTAX_DB=$out/tuned.db
fast=bsp,decomposed,copy_engine,push,push_specialized,push_words  # without those that are there to be compared with
fd=$folder/flash-decode/shapes.toml ag=$folder/all-gather-gemm/shapes.toml
rs=$(dirname "$0")/shapes/gemm-reduce-scatter.toml dm=$(dirname "$0")/shapes/decode-merge.toml
kv=$(dirname "$0")/shapes/kv-cache.toml
mkdir -p "$out"

for step in "${steps[@]}"; do
  case $step in
    fd) "${autotax[@]}" tune --shapes "$fd" --trials 90 | tee "$out/tune-fd.txt" ;;
    ag) "${autotax[@]}" tune --shapes "$ag" --trials 80 --variants "$fast" | tee "$out/tune-ag.txt" ;;
    fd-table)
      "${autotax[@]}" compare --shapes "$fd" --json >"$out/flash-decode.json"
      python3 -m autotax.report.ladder "$out/flash-decode.json" -o "$out" ;;
    ag-table) "${autotax[@]}" compare --shapes "$ag" --json >"$out/all-gather-gemm.json" ;;
    rs) "${autotax[@]}" tune --shapes "$rs" --trials 80 | tee "$out/tune-rs.txt" ;;
    rs-table) "${autotax[@]}" compare --shapes "$rs" --json >"$out/gemm-reduce-scatter.json" ;;
    dm) "${autotax[@]}" tune --shapes "$dm" --trials 60 | tee "$out/tune-dm.txt" ;;
    dm-table) "${autotax[@]}" compare --shapes "$dm" --json >"$out/decode-merge.json" ;;
    kv) "${autotax[@]}" tune --shapes "$kv" --trials 90 | tee "$out/tune-kv.txt" ;;
    kv-table) "${autotax[@]}" compare --shapes "$kv" --json >"$out/kv-cache.json" ;;
    stack) "${autotax[@]}" tune --shapes "$folder/runtime/shapes.toml" | tee "$out/tune-stack.txt" ;;
    page) "${autotax[@]}" report "$out"/{all-gather-gemm,flash-decode}.json -o "$out/report.html" ;;
    block)
      python3 "$(dirname "$0")/runtime/llama.py" --layers 4 --gate-up one --prefill 2048 8192 --decode 1 4 16 --train 2048 8192 \
        --db "$AUTOTAX_DB" --json "$out/llama.json" | tee "$out/llama.txt" ;;
    fused)
      here=$(dirname "$0")/runtime
      python3 "$here/fused_overhead.py" --db "$AUTOTAX_DB" --json "$out/fused-overhead.json" | tee "$out/fused-overhead.txt"
      python3 "$here/async_tp.py" --db "$AUTOTAX_DB" --json "$out/async-tp.json" | tee "$out/async-tp.txt"
      python3 "$here/async_tp.py" --train --db "$AUTOTAX_DB" --json "$out/async-tp-train.json" | tee "$out/async-tp-train.txt" ;;
    fd-soak) "${autotax[@]}" tune --shapes "$fd" --resume --trials 1 --soak 10000 | tee "$out/soak-fd.txt" ;;
    ag-soak) "${autotax[@]}" tune --shapes "$ag" --resume --trials 1 --soak 10000 | tee "$out/soak-ag.txt" ;;
    rs-soak) "${autotax[@]}" tune --shapes "$rs" --resume --trials 1 --soak 10000 | tee "$out/soak-rs.txt" ;;
    dm-soak) "${autotax[@]}" tune --shapes "$dm" --resume --trials 1 --soak 10000 | tee "$out/soak-dm.txt" ;;
    kv-soak) "${autotax[@]}" tune --shapes "$kv" --resume --trials 1 --soak 10000 | tee "$out/soak-kv.txt" ;;
    traces)
      mkdir -p "$out/traces" && traced=0
      while read -ra problem; do
        "${autotax[@]}" trace "${problem[@]}" --file "$out/traces/$((++traced)).json" </dev/null
      done <"$(dirname "$0")/shapes/traces.txt" | tee "$out/traces.txt" ;;
    *)
      echo "remake.sh: step is '$step'; allowed are fd, ag, rs, dm, kv, each also with -table or -soak, page, stack, block, fused and traces" >&2
      exit 2 ;;
  esac
done
