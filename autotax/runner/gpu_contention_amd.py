"""As `neighbours` on AMD GPUs, from what amd-smi tells. Written after its manual; it has never answered us."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from autotax.runner.gpu_contention import TIMEOUT_S, strangers

REASONS = ("prochot", "socket_thermal", "vr_thermal", "hbm_thermal")
"""Violations that are no part of ordinary work. The power limit, `ppt`, is met by every long GEMM."""


def look(addresses: Sequence[str], ours: Collection[int]) -> tuple[str, ...]:
    """Notices about the GPUs at these PCI addresses, on which the processes `ours` work.

    Nothing where there is no amd-smi, or where its answer is not understood.
    """
    wanted = {_plain(address) for address in addresses}
    mine = {gpu for gpu, entry in _of_gpus(_ask("list")) if _plain(str(entry.get("bdf", ""))) in wanted}
    processes = [
        (gpu, str(each["pid"]), str(each.get("name", "unknown")))
        for gpu, entry in _of_gpus(_ask("process"))
        for each in _dicts(entry)
        if gpu in mine and str(each.get("pid", "")).isdigit()
    ]
    throttled = []
    for gpu, entry in _of_gpus(_ask("metric", "--throttle")):
        states = {name: str(each.get(f"{name}_violation_status")) for each in _dicts(entry) for name in REASONS}
        active = ", ".join(name.replace("_", " ") for name, state in states.items() if state == "ACTIVE")
        if gpu in mine and active:
            throttled.append(f"GPU {gpu} holds its clocks down: {active}")
    return (*strangers(processes, ours), *throttled)


def device_addresses(count: int) -> list[str]:
    """PCI addresses of the first `count` GPUs as torch counts them; empty ones where torch does not tell."""
    import torch

    properties = [torch.cuda.get_device_properties(device) for device in range(min(count, torch.cuda.device_count()))]
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    known = [[getattr(each, name, None) for name in names] for each in properties]
    return ["" if None in parts else f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}" for parts in known]


def _plain(address: str) -> str:
    """Without the function, which torch does not tell."""
    return address.lower().rpartition(".")[0] or address.lower()


def _of_gpus(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The number of each GPU, and what is told of it: versions differ in how deep that lies."""
    for entry in _dicts(answer):
        if isinstance(entry.get("gpu"), int):
            yield str(entry["gpu"]), entry


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _dicts(each)


def _ask(*what: str) -> Any:
    try:
        command = ["amd-smi", *what, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
