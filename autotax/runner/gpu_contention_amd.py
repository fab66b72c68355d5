"""Like `gpu_contention` for AMD GPUs, from the output of amd-smi. Written after its manual and never run on an AMD GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from autotax.runner.gpu_contention import TIMEOUT_S, strangers

REASONS = ("prochot", "socket_thermal", "vr_thermal", "hbm_thermal")
"""Violations that do not occur in ordinary work. The power limit, `ppt`, is left out: every long GEMM reaches it."""


def look(addresses: Sequence[str], ours: Collection[int]) -> tuple[str, ...]:
    """Notices about the GPUs at these PCI addresses, on which the processes `ours` work.

    Returns nothing if there is no amd-smi, or if its output is not understood.
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
    """PCI addresses of the first `count` GPUs in torch's order; empty strings if torch does not know them."""
    import torch

    properties = [torch.cuda.get_device_properties(device) for device in range(min(count, torch.cuda.device_count()))]
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    known = [[getattr(each, name, None) for name in names] for each in properties]
    return ["" if None in parts else f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}" for parts in known]


def _plain(address: str) -> str:
    """The PCI address without the function number, which torch does not report."""
    return address.lower().rpartition(".")[0] or address.lower()


def _of_gpus(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the number of each GPU and its entry. Versions of amd-smi nest the entries differently."""
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
