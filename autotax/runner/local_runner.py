"""The live runner: measures on a pool of ranks, and survives candidates that crash or hang the ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autotax.core.config import Config
from autotax.core.errors import MachineError
from autotax.core.problem import Problem
from autotax.hardware import Hardware, check_world_size
from autotax.operators import loaded
from autotax.runner.measurement import Candidate, Effort, Job, Meanwhile, Measurement, Watch
from autotax.runner.pool import GroupLost, RankPool
from autotax.runner.precompile import CompileAhead
from autotax.runner.processes import ForkServer, disk_is_full, full_disk, tells_of_full_disk
from autotax.software import Environment

GPU_DEADLINE_S = 60.0
CPU_DEADLINE_S = 60.0
MOST_COMPILERS = 16
FORESIGHT = 8
"""Initial number of configs requested in advance, small enough for the search to learn in between. It grows by one each time the
ranks wait for a compiler, up to the number of compilers.
"""
GPU_HEAP_BYTES = 8 << 30
CPU_HEAP_BYTES = 256 << 20
STARTS = 3
"""Attempts to start ranks, with longer and longer pauses."""
PAUSE_S = 2.0
TRIAL = 2
"""Most candidates of a job of the search. They are compiled ahead; finalists have been compiled before."""


class LiveRunner:
    """Ranks on this machine, started at the first measurement and again after each loss.

    Ranks report before each stage. A group that is silent for `deadline_s` is killed, and the candidate gets the status `hang`.
    The same bound holds for a candidate as a whole without its soak, and for each replay of the soak. `seed` seeds all random
    numbers. Raises UsageError when the machine cannot hold the ranks.
    """

    def __init__(
        self,
        hardware: Hardware,
        world_size: int,
        *,
        deadline_s: float | None = None,
        modules: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        check_world_size(hardware, world_size)
        modules = tuple(dict.fromkeys((*loaded(), *modules)))
        self.hardware = hardware
        self.deadline_s = deadline_s or (GPU_DEADLINE_S if hardware.on_gpu else CPU_DEADLINE_S)
        heap_bytes = min(GPU_HEAP_BYTES, hardware.memory_gib << 27) if hardware.on_gpu else CPU_HEAP_BYTES
        spare = (os.cpu_count() or 1) - world_size - 1
        server, workers = ForkServer(), min(MOST_COMPILERS, spare)
        self.pool = RankPool(hardware, world_size, heap_bytes, modules, server)
        self.compilers = CompileAhead(hardware, workers, modules, server=server) if hardware.on_gpu and spare > 0 else None
        self.restarts = 0
        self.foresight = FORESIGHT if self.compilers else 1
        self._seed = seed
        self._watch = Watch(hardware.on_gpu)
        self._news: tuple[str, ...] = ()
        """Notices from the start of the group, which the next measurements carry."""
        self._environment: Environment | None = None
        self._sequence = 0

    @property
    def environment(self) -> Environment:
        """The software of the ranks; starts them if they are not running."""
        self._ensure_running()
        assert self._environment is not None
        return self._environment

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, meanwhile: Meanwhile | None = None
    ) -> list[Measurement]:
        """See Runner.measure. When the group is lost in a job of several candidates, each is run alone to find the culprits. The
        others are measured together again. Raises TimeIsUp after `effort.within_s`, and MachineError when a disk is full.
        """
        until = math.inf if effort.within_s is None else time.monotonic() + effort.within_s
        try:
            return self._measure(problem, candidates, replace(effort, within_s=None), meanwhile, until)
        except OSError as error:  # raised in this process, which starts ranks and compilers
            if why := full_disk(error):
                self.close()
                raise disk_is_full("where the tuner runs", why) from error
            raise

    def _measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, meanwhile: Meanwhile | None, until: float
    ) -> list[Measurement]:
        if not candidates:
            return []
        conditions = [self._conditions(candidate) for candidate in candidates]
        if self.compilers and len(candidates) <= TRIAL:
            for candidate in candidates:
                ahead = self.compilers.outcome(problem, candidate.config)
                if tells_of_full_disk(ahead.error):
                    self.pool.kill()
                    raise disk_is_full("where kernels are compiled", str(ahead.error))
                if ahead.lost:
                    others = [other for other in candidates if other != candidate]
                    measured = {result.candidate: result for result in self._measure(problem, others, effort, meanwhile, until)}
                    lost = Measurement(candidate, "compile_error", ahead.error, conditions=self._conditions(candidate))
                    return [measured.get(one, lost) for one in candidates]
        self._ensure_running(until)
        self._sequence += 1
        job = Job(self._sequence, problem, tuple(candidates), effort, self._seed + self._sequence)
        silence_s = self.deadline_s + effort.seconds * len(candidates)
        try:
            total_s = silence_s * (1 + effort.soak) * len(candidates)  # a soak that goes on is no hang, however slow it is
            reports = self.pool.run(job, silence_s, total_s, meanwhile, until)
        except GroupLost as loss:
            self.restarts += 1
            if len(candidates) == 1:
                return [Measurement(candidates[0], loss.status, str(loss), conditions=conditions[0])]
            return self._without_culprits(problem, candidates, effort, loss, until)
        readings = [report.yardstick for report in reports if report.yardstick is not None]
        yardsticks = [reading.us for reading in readings]
        if readings:
            rates = [round(reading.copy_gbps) for reading in readings]
            beside = {"yardstick_us": [round(us, 1) for us in yardsticks], "copy_gbps": rates}
            conditions = [condition | beside for condition in conditions]
        notices = self._notices(yardsticks, effort)
        ranks_s = max(report.seconds for report in reports) / len(candidates)
        measurements = [
            Measurement.merge(candidate, [report.accounts[i] for report in reports], conditions[i])
            for i, candidate in enumerate(candidates)
        ]
        return [replace(measurement, ranks_s=ranks_s, notices=notices) for measurement in measurements]

    def _without_culprits(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, loss: GroupLost, until: float
    ) -> list[Measurement]:
        alone = [self._measure(problem, [candidate], effort, None, until)[0] for candidate in candidates]
        innocent = [i for i, m in enumerate(alone) if m.verified]
        if len(innocent) == len(candidates):
            status = "hang" if loss.status == "hang" else "crash"
            return [replace(m, status=status, error=f"lost only when measured together: {loss}", samples=()) for m in alone]
        again = self._measure(problem, [candidates[i] for i in innocent], effort, None, until)
        return [again[innocent.index(i)] if i in innocent else m for i, m in enumerate(alone)]

    def expect(self, problem: Problem, configs: Sequence[Config], later: Iterable[Config] = ()) -> int:
        """See Runner.expect. Returns the first config that is compiled, or the first of all if none is."""
        if self.compilers is None:
            return 0
        self.compilers.expect(problem, configs)
        self.compilers.fill(problem, later)
        for place, config in enumerate(configs):
            if self.compilers.ready(problem, config):
                return place
        if len(configs) == self.foresight:
            self.foresight = max(self.foresight, min(self.foresight + 1, self.compilers.workers))
        return 0

    def close(self) -> None:
        if self.compilers:
            self.compilers.close()
        self.pool.close()

    def _ensure_running(self, until: float = math.inf) -> None:
        if not self.pool.running:
            self._environment = self._start(until)
            self._news = self._neighbours()

    def _start(self, until: float) -> Environment:
        """Starts the ranks, in several attempts: lost ranks may hold their devices a moment longer, and a rank may be killed as
        it starts.
        """
        for attempt in range(1, STARTS + 1):
            try:
                return self.pool.start(until)
            except GroupLost as loss:
                last = loss
                self.restarts += 1
                if self._environment is None and loss.status == "hang":  # a hang takes minutes and would recur
                    break
                if attempt < STARTS:
                    time.sleep(attempt * PAUSE_S)
        again = "" if self._environment is None else " again"
        raise MachineError(f"the ranks do not start{again} ({last}): run `autotax doctor`, then the same command") from last

    def _notices(self, yardsticks: Sequence[float], effort: Effort) -> tuple[str, ...]:
        """Notices for the user about the machine during the job that has just ended."""
        news, self._news = self._news, ()
        if effort.soak:  # the job of the finalists
            news += self._neighbours()
        return tuple(dict.fromkeys((*news, *(self._watch.note(yardsticks) if yardsticks else ()))))

    def _neighbours(self) -> tuple[str, ...]:
        ours = {os.getpid(), *(rank.child.process.pid for rank in self.pool.ranks)}
        if self.hardware.backend == "cuda":
            return look(device_uuids(self.pool.world_size), ours)
        if self.hardware.backend == "rocm":
            return look_amd(device_addresses(self.pool.world_size), ours)
        return ()

    def _conditions(self, candidate: Candidate) -> dict[str, Any]:
        """The conditions of the measurement, as stored with it."""
        return candidate.conditions.to_dict() | {"clock": "device" if self.hardware.on_gpu else "wall"}


# Other processes on the GPUs, and clocks held down by the hardware, as nvidia-smi and amd-smi report them. Never fails a run. In
# a container, nvidia-smi may list process ids of another namespace. If none of the listed processes is one of ours, our
# processes cannot be recognised. Then only several processes on the same GPU give a notice.

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
    return [str(getattr(gpu, "uuid", "")) for gpu in properties]


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


# AMD GPUs. Written after the manual of amd-smi and never run on an AMD GPU.

VIOLATIONS = ("prochot", "socket_thermal", "vr_thermal", "hbm_thermal")
"""Violations that do not occur in ordinary work. The power limit, `ppt`, is left out: every long GEMM reaches it."""


def look_amd(addresses: Sequence[str], ours: Collection[int]) -> tuple[str, ...]:
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
    return (*strangers(processes, ours), *throttled)


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
