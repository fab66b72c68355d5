"""The interface between tuner and runner: candidates, effort, measurements."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import joined, summary
from autotax.core.problem import Problem
from autotax.core.settings import TRIAL_STATUSES
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources
from autotax.software import Environment

REFERENCES = 4
"""References of a problem on a rank at most. Each may take as long as a stage of a candidate."""
PAIRED = "paired"
"""The key in a measurement's conditions with the ratio to the incumbent of a search, which was measured in the same job."""


@dataclass(frozen=True)
class Candidate:
    """A config, and the conditions under which it is called."""

    config: Config
    conditions: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True)
class Effort:
    """How hard to measure. `seconds` bounds the timing of one candidate, `samples` the number of its samples. At least `fewest`
    samples are taken, however long they take.
    """

    samples: int = 20
    seconds: float = 0.25
    fewest: int = 0
    give_up_us: float | None = None
    """A candidate whose first samples are slower than this is not measured further (status `pruned`)."""
    soak: int = 0
    """Replays with random delays and changing inputs, each compared with its reference, that a timed candidate must pass."""
    within_s: float | None = None
    """Seconds that the whole job may take, restarts of ranks included; a live runner then raises TimeIsUp. None: no limit."""


class TimeIsUp(Exception):
    """The job did not end within `Effort.within_s`. Its ranks are killed, and its candidates are not to blame."""


@dataclass(frozen=True)
class RankReport:
    """One rank's account of one candidate. `samples` are microseconds a call."""

    status: str
    error: str | None = None
    samples: tuple[float, ...] = ()
    compile_s: float = 0.0
    relative_error: float | None = None
    device_s: float = 0.0
    """Seconds in stages that work on the device."""
    remeasured: int = 0
    """Suspiciously fast samples that were taken again."""
    soaked: int = 0
    """Replays of the soak that the candidate passed."""
    beside: dict[str, float] = field(default_factory=dict)
    """Further figures of the same samples, over all ranks, as stored: see Measurement."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of a candidate, from the reports of all ranks."""

    candidate: Candidate
    status: str
    error: str | None = None
    samples: tuple[tuple[float, ...], ...] = ()
    """Microseconds a call, one tuple a rank; the i-th samples of all ranks were taken at the same time. In place, a sample is the
    time of this rank with calls minus the time of the slowest rank without calls. It may be negative.
    """
    compile_s: float = 0.0
    relative_error: float | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    """How the candidate was measured, as stored: `Conditions.to_dict()` and further facts needed to read the figure. In place it
    has `behind` (`Operator.behind`), `back_to_back_us`, and `between_us`, the time of the work before one call.
    """
    device_s: float = 0.0
    """Seconds of the stages that work on the device; the maximum over the ranks."""
    ranks_s: float = 0.0
    """Seconds of all work of the ranks, by their own clocks. A job of several candidates is divided among them."""
    notices: tuple[str, ...] = ()
    """Notices for the user from this measurement: a slow rank, lower clocks, another process on the GPU. One line each."""
    jobs: tuple[int, ...] = ()
    """Number of samples of each job, in order; empty if all samples are of one job."""

    @classmethod
    def merge(cls, candidate: Candidate, reports: Sequence[RankReport], conditions: dict[str, Any]) -> Measurement:
        """Merges the reports of all ranks, in rank order: the gravest status, every rank's cause, the worst error."""
        status = max((report.status for report in reports), key=TRIAL_STATUSES.index)
        errors = [report.error for report in reports if report.error and report.status == status]
        relative_errors = [report.relative_error for report in reports if report.relative_error is not None]
        passed = {"soak": reports[0].soaked} if reports[0].soaked else {}
        again = {"remeasured": reports[0].remeasured} if reports[0].remeasured else {}
        return cls(
            candidate=candidate,
            status=status,
            error=joined(errors) if errors else None,
            samples=tuple(report.samples for report in reports) if all(report.samples for report in reports) else (),
            compile_s=max(report.compile_s for report in reports),
            relative_error=max(relative_errors) if relative_errors else None,
            conditions=conditions | passed | again | reports[0].beside,
            device_s=max(report.device_s for report in reports),
        )

    def __repr__(self) -> str:
        """`<Measurement push(comm=8): ok, 118.2 us, 50 samples>`"""
        figure = f", {self.latency_us:.1f} us, {len(self.samples[0])} samples" if self.latency_us is not None else ""
        error = f", {summary(self.error)}" if self.error else ""
        return f"<Measurement {self.config}: {self.status}{figure}{error}>"

    @cached_property
    def config(self) -> Config:
        return self.candidate.config

    @cached_property
    def verified(self) -> bool:
        """Whether the run that took the samples checked its output and found it right."""
        return self.status in ("ok", "pruned")

    @cached_property
    def rounds(self) -> list[float]:
        """For each sample the maximum over the ranks: the time after which every rank had its result."""
        return [max(sample) for sample in zip(*self.samples, strict=True)]

    @property
    def rounds_by_job(self) -> list[list[float]]:
        """The rounds of each job. Jobs differ by more than samples of one job do."""
        rounds = iter(self.rounds)
        return [list(islice(rounds, count)) for count in self.jobs or (len(self.rounds),)]

    @cached_property
    def latency_us(self) -> float | None:
        """Median over the samples of the maximum over the ranks; None without samples."""
        return statistics.median(self.rounds) if self.samples else None

    @cached_property
    def score_us(self) -> float | None:
        """The figure that a search compares, in microseconds: the figure from the pair if there is one, else the latency."""
        paired = self.conditions.get(PAIRED)
        return float(paired["us"]) if paired else self.latency_us

    @property
    def back_to_back_us(self) -> float | None:
        """The latency of the same calls back to back, for calls that are captured; None where that was not measured."""
        us = self.conditions.get("back_to_back_us")
        return self.latency_us if us is None and self.candidate.conditions.mode == "graph" else us

    @property
    def slowest_rank(self) -> int | None:
        """The rank with the greatest median."""
        medians = [statistics.median(samples) for samples in self.samples]
        return medians.index(max(medians)) if medians else None


Overlap = Callable[[], None]
"""Work of the caller while the ranks measure. The runner may call it late, after the ranks have finished, or never."""


class Runner(Protocol):
    """Measures candidates. A live runner has ranks and devices, a replayed one has their records."""

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        """One measurement for each candidate, in order; with several, their samples are interleaved.

        A candidate that fails in any way is an answer, not an exception.
        """
        ...

    @property
    def foresight(self) -> int:
        """How many configs it is good to know in advance; 1 if none is compiled ahead."""
        ...

    def expect(self, problem: Problem, configs: Sequence[Config], later: Iterable[Config] = ()) -> int:
        """Announces configs that may be measured soon. Returns the index of one that can be measured without waiting for a
        compiler. Idle compilers compile the configs of `later`.
        """
        ...

    def close(self) -> None:
        """Gives ranks and devices back; safe to call twice."""
        ...


# Readings of the ranks' yardsticks and their comparison. They need no torch, which takes seconds to import.

SLOW_RANK = {"gpu": 1.15, "cpu": 2.0}
"""A rank that takes this many times as long as the others gives a notice. CPU ranks share cores and are noisy."""
SLOW_ALL = {"gpu": 1.10, "cpu": 2.0}
"""Ranks that all take this many times their best time give a notice too."""


@dataclass(frozen=True)
class Reading:
    """Of one rank."""

    us: float
    """Microseconds of the whole work."""
    copy_gbps: float
    """GB/s of its copy, read and written bytes together: the memory bandwidth that a plain kernel gets."""

    def best(self, other: Reading) -> Reading:
        return Reading(min(self.us, other.us), max(self.copy_gbps, other.copy_gbps))


class Watch:
    """Compares the ranks' yardsticks with each other, and with the best of each rank so far."""

    def __init__(self, on_gpu: bool) -> None:
        self._kind = "gpu" if on_gpu else "cpu"
        self._best: list[float] = []

    def note(self, figures: Sequence[float]) -> tuple[str, ...]:
        """Notices for the user about the yardsticks of a job, which are given in rank order."""
        self._best = [min(pair) for pair in zip(figures, self._best or figures, strict=True)]
        notices = []
        for rank, us in enumerate(figures):
            others = [*figures[:rank], *figures[rank + 1 :]]
            if others and us > SLOW_RANK[self._kind] * statistics.median(others):
                slower = us / statistics.median(others) - 1
                notices.append(
                    f"rank {rank} is {slower:.0%} slower than the others at fixed work: "
                    "its clocks are lower or something else runs on its device"
                )
        slowdown = min(us / best for us, best in zip(figures, self._best, strict=True))
        if slowdown > SLOW_ALL[self._kind]:
            notices.append(
                f"all ranks are {slowdown - 1:.0%} slower than at their best: clocks are throttled, or the machine is shared"
            )
        return tuple(notices)


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
    """UUIDs of the first `count` GPUs in torch's order, not nvidia-smi's; empty strings if torch does not know them."""
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


# Messages between the tuner's process and its ranks and compilers.

@dataclass(frozen=True)
class RankSetup:
    """How a rank process joins its group."""

    rank: int
    world_size: int
    backend: str
    meeting: str
    """`Meeting.address` of the group."""
    heap_bytes: int
    modules: tuple[str, ...]
    """Modules with further operators and variants, which the rank loads first."""


@dataclass(frozen=True)
class Job:
    """One lockstep step of all ranks: measure these candidates, interleaved."""

    sequence: int
    problem: Problem
    candidates: tuple[Candidate, ...]
    effort: Effort
    seed: int
    """Seeds all random numbers of the job: delays of the ranks, order of the inputs."""


@dataclass(frozen=True)
class Hello:
    """A rank is ready. The fields describe its software."""

    environment: Environment
    loaded: Mapping[str, str]
    """The digest of each module that it has loaded from outside this package."""


@dataclass(frozen=True)
class Stage:
    """The current stage of a rank, sent before the stage begins because the rank may hang in it."""

    text: str


@dataclass(frozen=True)
class Raised:
    """A rank raised an error in its stage. If all ranks still agree on the outcome, it sends its next message."""

    status: str
    text: str
    at: float = field(default_factory=time.monotonic)
    """Time of the error on the monotonic clock, which all processes of the machine share."""


@dataclass(frozen=True)
class Report:
    """A rank's answer to a job: one account a candidate."""

    accounts: tuple[RankReport, ...]
    yardstick: Reading | None = None
    """Reading of the yardstick taken next to the samples; None if there were no samples."""
    seconds: float = 0.0
    """From the job's arrival to this report."""


@dataclass(frozen=True)
class Fatal:
    """The rank can no longer be used and exits; the fields give the reason."""

    text: str
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Compilation:
    """Request to a compiler process: compile all kernels of a config for the hardware's target."""

    problem: Problem
    config: Config
    hardware: Hardware


@dataclass(frozen=True)
class CompilerReady:
    """A compiler process has done its imports and is ready."""


@dataclass(frozen=True)
class CompilerAnswer:
    """The outcome of a compilation. `lost` means that the compiler process died, so a rank must not compile this config. An error
    that was merely raised is safe to repeat.
    """

    error: str | None
    lost: bool = False
    kernels: tuple[Resources, ...] = ()
    """Resources of the compiled kernels; empty for a config without own kernels."""
