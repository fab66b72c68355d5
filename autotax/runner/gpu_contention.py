"""Other processes on the GPUs, and clocks held down by the hardware, as nvidia-smi reports them. Never fails a run.

In a container, nvidia-smi may list process ids of another namespace. If none of the listed processes is one of ours, our
processes cannot be recognised. Then only several processes on the same GPU give a notice.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence

TIMEOUT_S = 5.0
# NVML's clocks event reasons that do not occur in ordinary work. The power cap is left out: every long GEMM reaches it.
REASONS = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}


def look(devices: Sequence[str], ours: Collection[int]) -> tuple[str, ...]:
    """Notices about `devices` (UUIDs as torch or nvidia-smi write them), on which the processes `ours` work.

    Returns nothing if there is no nvidia-smi, or if it does not answer in time.
    """
    gpus = _ask("--query-gpu=index,uuid,clocks_throttle_reasons.active")
    apps = _ask("--query-compute-apps=gpu_uuid,pid,process_name")
    names = {_plain(uuid): index for index, uuid, _ in gpus if _plain(uuid) in {_plain(device) for device in devices}}
    reasons = [(names[_plain(uuid)], bits) for _, uuid, bits in gpus if _plain(uuid) in names]
    processes = [(names[_plain(uuid)], pid, name) for uuid, pid, name in apps if _plain(uuid) in names and pid.isdigit()]
    return (*strangers(processes, ours), *_throttled(reasons))


def device_uuids(count: int) -> list[str]:
    """UUIDs of the first `count` GPUs in torch's order, which may differ from nvidia-smi's; empty strings if torch does not know
    them.
    """
    import torch

    properties = [torch.cuda.get_device_properties(device) for device in range(min(count, torch.cuda.device_count()))]
    return [str(getattr(each, "uuid", "")) for each in properties]


def strangers(processes: Sequence[tuple[str, str, str]], ours: Collection[int]) -> list[str]:
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
