"""Seconds for a trial, finals included, by device and operator: medians over the runs of the landscapes of this folder.

    PYTHONPATH=. python results/paces.py > autotax/templates/paces.json
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def paces() -> dict[str, dict[str, float]]:
    """Seconds for a trial by device and operator."""
    durations: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(HERE.glob("*/landscapes.json.gz")):
        with gzip.open(path) as file:
            landscapes = json.load(file)
        for run in landscapes["runs"]:
            accounts = run.get("accounts") or {}
            if accounts.get("trials"):
                device = landscapes["hardware"][run["hardware"]]["device"]
                durations[device][run["problem"].partition("/")[0]].append(accounts["seconds"] / accounts["trials"])
    return {
        device: {op: round(statistics.median(seconds), 2) for op, seconds in sorted(ops.items())}
        for device, ops in sorted(durations.items())
    }


if __name__ == "__main__":
    print(json.dumps(paces(), indent=1))
