#!/usr/bin/env bash
# Resolves the requirements of the wheel, with the extra `test`, beside those of servers; no package is installed. Fails where
# there is no solution, or where one of the wheel's own requirements resolves to a prerelease.
#
#     UV=uv results/versions/resolve.sh [REQUIREMENT ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
own='^(altair|hypothesis|jinja2|mypy|msgspec|numpy|optuna|platformdirs|psutil|psycopg|pytest|rich|ruff|sqlalchemy|torch|triton|typer|vl-convert-python)=='
for beside in "${@:-vllm==0.33.0 sglang==0.5.23 torchtitan==0.3.0}"; do
  for requirement in $beside; do
    for constraints in "" constraints-common.txt; do
      found=$(echo "$requirement" | ${UV:-uv} pip compile -q --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
        --no-header --no-annotate --extra test ${constraints:+-c $constraints} pyproject.toml -)
      picked=$(grep -E "$own" <<<"$found")
      echo "$requirement, ${constraints:-no constraints}: $(grep -cve '^$' <<<"$found") packages; $(grep -E '^(numpy|torch|triton|vl-convert-python)==' <<<"$picked" | tr '\n' ' ')"
      if grep -E '==[0-9.]+(a|b|rc|\.dev)[0-9]' <<<"$picked"; then
        echo "a prerelease is picked" >&2
        exit 1
      fi
    done
  done
done
