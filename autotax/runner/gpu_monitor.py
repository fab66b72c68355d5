"""Other processes on the GPUs, and clocks held down by the hardware, as nvidia-smi and amd-smi report them. Never fails a run.

In a container, nvidia-smi may list process ids of another namespace. If none of the listed processes is one of ours, our
processes cannot be recognised. Then only several processes on the same GPU give a notice.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Sequence
from typing import Any

TIMEOUT_S = 5.0
# NVML's clocks event reasons that do not occur in ordinary work. The power cap is left out: every long GEMM reaches it.
REASONS = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}


def nvidia_notices(devices: Sequence[str], ours: Collection[int]) -> tuple[str, ...]:
    """Notices about `devices` (UUIDs as torch or nvidia-smi write them), on which the processes `ours` work.

    Returns nothing if there is no nvidia-smi, or if it does not answer in time.
    """
    gpus = _ask("--query-gpu=index,uuid,clocks_throttle_reasons.active")
    apps = _ask("--query-compute-apps=gpu_uuid,pid,process_name")
    names = {_plain(uuid): index for index, uuid, _ in gpus if _plain(uuid) in {_plain(device) for device in devices}}
    reasons = [(names[_plain(uuid)], bits) for _, uuid, bits in gpus if _plain(uuid) in names]
    processes = [(names[_plain(uuid)], pid, name) for uuid, pid, name in apps if _plain(uuid) in names and pid.isdigit()]
    return (*other_processes(processes, ours), *_throttled(reasons))


def device_uuids(count: int) -> list[str]:
    """UUIDs of the first `count` GPUs in torch's order, not nvidia-smi's; empty strings if torch does not know them."""
    import torch

    properties = [torch.cuda.get_device_properties(device) for device in range(min(count, torch.cuda.device_count()))]
    return [str(getattr(gpu, "uuid", "")) for gpu in properties]


def other_processes(processes: Sequence[tuple[str, str, str]], ours: Collection[int]) -> list[str]:
    """Notices about other processes, from (GPU, process id, name) of every process on our GPUs."""
    if any(int(pid) in ours for _, pid, _ in processes):
        others = [process for process in processes if int(process[1]) not in ours]
        return [f"another process (pid {pid}, {name}) uses GPU {gpu}" for gpu, pid, name in others]
    counts = {gpu: sum(other == gpu for other, _, _ in processes) for gpu, _, _ in processes}
    return [f"{count} processes use GPU {gpu}, of which one is ours" for gpu, count in counts.items() if count > 1]


def _throttled(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """Notices about lowered clocks, from (GPU, hexadecimal reasons)."""
    notices = []
    for gpu, bits in reasons:
        active = int(bits, 16) if bits.startswith("0x") else 0
        if why := ", ".join(name for bit, name in REASONS.items() if active & bit):
            notices.append(f"GPU {gpu} holds its clocks down: {why}")
    return notices


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _ask(query: str) -> list[tuple[str, str, str]]:
    """The rows of a query of three columns."""
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [tuple(cell.strip() for cell in line.split(",", 2)) for line in answer.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


# AMD GPUs. Written after the manual of amd-smi and never run on an AMD GPU.

VIOLATIONS = ("prochot", "socket_thermal", "vr_thermal", "hbm_thermal")
"""Violations that do not occur in ordinary work. The power limit, `ppt`, is left out: every long GEMM reaches it."""


def amd_notices(addresses: Sequence[str], ours: Collection[int]) -> tuple[str, ...]:
    """Notices about the GPUs at these PCI addresses, on which the processes `ours` work.

    Returns nothing if there is no amd-smi, or if its output is not understood.
    """
    buses = {_bus(address) for address in addresses}
    mine = {gpu for gpu, entry in _of_gpus(_ask_amd("list")) if _bus(str(entry.get("bdf", ""))) in buses}
    processes = [
        (gpu, str(entries["pid"]), str(entries.get("name", "unknown")))
        for gpu, entry in _of_gpus(_ask_amd("process"))
        for entries in _dicts(entry)
        if gpu in mine and str(entries.get("pid", "")).isdigit()
    ]
    throttled = []
    for gpu, entry in _of_gpus(_ask_amd("metric", "--throttle")):
        states = {name: str(entries.get(f"{name}_violation_status")) for entries in _dicts(entry) for name in VIOLATIONS}
        active = ", ".join(name.replace("_", " ") for name, state in states.items() if state == "ACTIVE")
        if gpu in mine and active:
            throttled.append(f"GPU {gpu} holds its clocks down: {active}")
    return (*other_processes(processes, ours), *throttled)


def device_addresses(count: int) -> list[str]:
    """PCI addresses of the first `count` GPUs in torch's order; empty strings if torch does not know them."""
    import torch

    properties = [torch.cuda.get_device_properties(device) for device in range(min(count, torch.cuda.device_count()))]
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    places = [[getattr(gpu, name, None) for name in names] for gpu in properties]
    return ["" if None in parts else f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}" for parts in places]


def _bus(address: str) -> str:
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
    for branch in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _dicts(branch)


def _ask_amd(*what: str) -> Any:
    try:
        command = ["amd-smi", *what, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
