"""The devices of this machine and how they are linked. `detect()` describes them.

A tuned config holds for one digest of the hardware and one of the software; see `autotax/software.py`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotax import former_names
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem

LOOPBACK = "lo"
"""The network interface by which the ranks of a host meet."""
SIOCGIFFLAGS, IFF_UP = 0x8913, 1
"""Linux: the request for the flags of a network interface, and the flag of one that is up."""
BACKENDS = ("cuda", "rocm", "cpu")
CPU_WORLD_SIZE = 2
DEVICE_NODES = Path("/dev")
GPU_NODES = ("nvidia", "nvhost", "nvgpu", "nvmap", "dxg", "kfd")
"""Prefixes of the names of device nodes on hosts with GPUs: NVIDIA, Tegra, WSL, AMD."""
KERNEL_DRIVER = Path("/dev/kfd")
"""The device node of the driver of AMD GPUs. It exists independently of the installed torch."""
INFINITY_CACHE = {"hip:gfx942": 256 << 20, "hip:gfx950": 256 << 20}
"""Bytes of the cache between the dies' L2 and the memory, by target."""
UNITS_OF_A_DIE = {"hip:gfx942": 38, "hip:gfx950": 32}
"""Compute units that each die of a GPU has; MI300A has six dies, MI300X eight."""
ATTRIBUTE_DIES = 10018
"""hipDeviceAttributeNumberOfXccs."""
HARDWARE_QUEUES = 8
"""Hardware queues of a process on ROCm; the default is four. They serve the streams of torch and RCCL, and up to three streams
next to kernels that wait.
"""
LOCAL_DATA_SHARE = {"gfx950": 160 * 1024}
"""Bytes of shared memory of a compute unit if it is not 64 KiB. torch does not report it."""
REGISTERS = 65536
"""Registers of a processor of NVIDIA, which its resident programs share."""


def content_digest(values: dict[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the values as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Described:
    """Plain values in the fields of a dataclass, with a digest."""

    @cached_property
    def digest(self) -> str:
        return content_digest(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Hardware(Described):
    """The devices of one host. `target` is Triton's name of the architecture, for instance `cuda:90` or `hip:gfx942`."""

    backend: str
    device: str
    target: str
    count: int
    memory_gib: int
    processors: int
    """Streaming multiprocessors or compute units of one device."""
    shared_memory: int
    """Bytes of shared memory that one program may take."""
    l2_bytes: int
    links: str

    @cached_property
    def on_gpu(self) -> bool:
        return self.backend != "cpu"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the largest cache between the processors and the memory. Cold inputs must not be in it."""
        return max(self.l2_bytes, INFINITY_CACHE.get(self.target, 0))

    @property
    def dies(self) -> int:
        """Number of dies of a GPU, which hands out programs to them in turn; each die has its own L2. One if no dies are known.
        """
        return max(1, self.processors // UNITS_OF_A_DIE.get(self.target, self.processors or 1))

    @property
    def family(self) -> str:
        """`cuda`, `hip` or `interpreter`: the constexpr TARGET of kernels."""
        return self.target.partition(":")[0]

    @property
    def launches_overlap(self) -> bool:
        """Whether a kernel may begin while the one before it ends: on NVIDIA's GPUs from Hopper on."""
        return self.family == "cuda" and int(self.target.partition(":")[2]) >= 90

    @property
    def fully_linked(self) -> bool:
        """Whether there are several GPUs, each of which reaches the memory of all others."""
        return self.on_gpu and self.count > 1 and self.links == peer_access(self.count, self.count * (self.count - 1))

    @property
    def default_world_size(self) -> int:
        """The GPUs present, or two CPU ranks."""
        return self.count if self.on_gpu else CPU_WORLD_SIZE

    def __str__(self) -> str:
        if not self.on_gpu:
            return f"CPU ranks on the Triton interpreter ({self.device})"
        return f"{self.count} x {self.device} ({self.target}, {self.links})"


def peer_access(count: int, reach: int) -> str:
    """`links` of `count` devices, of which `reach` ordered pairs reach each other's memory."""
    return f"peer access {reach}/{count * (count - 1)} pairs"


HEAP_VARIABLE, HEAPS = "AUTOTAX_HEAP", ("torch", "iris")


def symmetric_heap(backend: str) -> str:
    """The library of symmetric memory on GPUs: $AUTOTAX_HEAP, or else torch on cuda, iris on rocm. Raises UsageError."""
    chosen = os.environ.get(HEAP_VARIABLE) or (os.environ.get("AUTOTAX_ROCM_HEAP") if backend == "rocm" else "")
    if chosen and chosen not in HEAPS:
        raise UsageError(f"{HEAP_VARIABLE} is {chosen!r}; allowed are iris and torch: set one of these on all ranks, or none")
    return chosen or ("iris" if backend == "rocm" else "torch")


def has_iris() -> bool:
    """Whether AMD's Iris and the package that its operators import are installed. Another project is called iris, too. Nothing is
    imported: Iris loads libraries of the GPU.
    """
    spec = importlib.util.find_spec("iris")
    ours = bool(spec and spec.origin) and Path(str(spec and spec.origin)).with_name("ops").is_dir()
    return ours and importlib.util.find_spec("tritonblas") is not None


def dies_by_hip() -> int | None:
    """The number of dies of the first GPU according to HIP; None if HIP does not report it, as before ROCm 7."""
    try:
        hip, count = ctypes.CDLL("libamdhip64.so"), ctypes.c_int()
        failed = hip.hipDeviceGetAttribute(ctypes.byref(count), ATTRIBUTE_DIES, 0)
    except (OSError, AttributeError):
        return None
    return count.value if not failed and count.value > 0 else None


def backends_present() -> list[str]:
    """The backends of this host."""
    # Importing torch takes seconds, so it is skipped on hosts without any GPU.
    if not any(node.name.startswith(GPU_NODES) for node in DEVICE_NODES.iterdir()):
        return ["cpu"]
    import torch

    if torch.cuda.is_available():
        return ["rocm" if torch.version.hip else "cuda", "cpu"]
    return ["cpu"]


def lack_of_rocm() -> tuple[str, str] | None:
    """Why torch sees no GPU on a host with the AMD driver, and the remedy; None on other hosts."""
    if not KERNEL_DRIVER.exists():
        return None
    import torch

    if torch.version.hip:
        return f"{KERNEL_DRIVER} is here, but torch {torch.__version__} sees no GPU", (
            "add the user to the groups render and video, unset HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, look at `rocminfo`"
        )
    return f"{KERNEL_DRIVER} is here, thus AMD GPUs, but torch {torch.__version__} is not built for ROCm", (
        "install the builds of torch and triton for ROCm that pytorch.org names"
    )


@functools.cache
def detect(backend: str | None = None) -> Hardware:
    """This machine: its GPUs, or CPU ranks if there are none or with `backend="cpu"`.

    Raises UsageError for a backend that is unknown or not here.
    """
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"backend is {backend!r}; allowed are {', '.join(BACKENDS)}: give one of these as --backend")
    # CPU ranks do not need torch here, so its slow import is skipped.
    present = ["cpu"] if backend == "cpu" else backends_present()
    if present == ["cpu"] and backend != "cpu" and (lack := lack_of_rocm()):
        raise UsageError(f"{lack[0]}: {lack[1]}, or tune CPU ranks by --backend cpu")
    if backend is not None and backend not in present:
        raise UsageError(
            f"backend is {backend!r}; this machine has {', '.join(present)}: leave --backend out, or run `autotax doctor`"
        )
    return _detect_gpus(backend or present[0]) if (backend or present[0]) != "cpu" else _detect_cpu()


def _detect_cpu() -> Hardware:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Hardware(
        backend="cpu",
        device=platform.machine(),
        target="interpreter",
        count=os.cpu_count() or 1,
        memory_gib=round(pages * page / 2**30),
        processors=4,  # programs of a persistent kernel; the interpreter runs them one after another
        shared_memory=2**31 - 1,
        l2_bytes=0,
        links="shared memory",
    )


def _detect_gpus(backend: str) -> Hardware:
    import torch

    count = torch.cuda.device_count()
    first = torch.cuda.get_device_properties(0)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reach = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if backend == "cuda":
        # This attribute is missing in torch's stubs.
        target, shared = f"cuda:{first.major}{first.minor}", int(getattr(first, "shared_memory_per_block_optin"))  # noqa: B009
    else:
        architecture = first.gcnArchName.split(":")[0]
        target, shared = f"hip:{architecture}", LOCAL_DATA_SHARE.get(architecture, 64 * 1024)
    return Hardware(
        backend=backend,
        device=first.name,
        target=target,
        count=count,
        memory_gib=round(first.total_memory / 2**30),
        processors=first.multi_processor_count,
        shared_memory=shared,
        l2_bytes=int(first.L2_cache_size),
        links="one device" if not pairs else peer_access(count, reach),
    )


# Machines that are not here, for plans.

MACHINES: dict[str, tuple[str, str, str, int, int, int, int]] = {
    "h100": ("cuda", "NVIDIA H100 80GB HBM3", "cuda:90", 79, 132, 232448, 50 << 20),
    "h200": ("cuda", "NVIDIA H200", "cuda:90", 140, 132, 232448, 60 << 20),
    "b200": ("cuda", "NVIDIA B200", "cuda:100", 178, 148, 232448, 126 << 20),
    "mi300": ("rocm", "AMD Instinct MI300X", "hip:gfx942", 191, 304, 64 << 10, 4 << 20),
}
"""Backend, device, target, GiB, processors, and bytes of shared memory and of L2, by a short name."""


def absent(name: str) -> Hardware:
    """A machine that need not be here, for instance `h100x8`. Raises UsageError for a name that is not known."""
    device, _, count = name.lower().rpartition("x")
    if device not in MACHINES or not count.isdecimal() or not 1 <= int(count) <= 16:
        raise UsageError(f"hardware is {name!r}; allowed are {', '.join(MACHINES)} with a number, as h100x8: give another")
    backend, model, target, gib, processors, shared, l2 = MACHINES[device]
    pairs = int(count) * (int(count) - 1)
    links = f"peer access {pairs}/{pairs} pairs" if pairs else "one device"
    return Hardware(backend, model, target, int(count), gib, processors, shared, l2, links)


def check_problems(problems: Sequence[Problem], hardware: Hardware) -> None:
    """Raises UsageError for problems that the machine cannot run, before anything is started or written."""
    for problem in problems:
        require_problem(problem)
        check_world_size(hardware, problem.world_size)
        _check_memory(hardware, problem)


def require_problem(problem: object) -> None:
    """Raises UsageError for anything but a problem."""
    if not isinstance(problem, Problem):
        example = "autotax.AllGatherGemm(m=512, n=7168, k=8192)"
        raise UsageError(f"problem is {problem!r}; it must be a problem, as {example}: give one")


def _check_memory(hardware: Hardware, problem: Problem) -> None:
    """Raises UsageError if the machine has no room to measure the problem: two sets of inputs, and a float32 reference."""
    gib = 4 * problem.nbytes / 2**30
    room = hardware.memory_gib if hardware.on_gpu else hardware.memory_gib / problem.world_size
    if gib > room:
        raise UsageError(
            f"{problem.op} of these sizes needs about {gib:.0f} GiB a rank to be measured; a rank has {room:.0f} GiB: "
            "give smaller sizes or a greater --world-size"
        )


def check_loopback() -> None:
    """Raises MachineError if the network interface is down by which the ranks of a host meet."""
    interfaces = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with interfaces, suppress(OSError):  # without IPv4, the libraries of the ranks say what they lack
        flags = struct.unpack_from("h", fcntl.ioctl(interfaces, SIOCGIFFLAGS, struct.pack("16s16x", LOOPBACK.encode())), 16)[0]
        if not flags & IFF_UP:
            raise MachineError(f"the network interface {LOOPBACK} is down, and ranks meet there: `ip link set {LOOPBACK} up`")


def check_world_size(hardware: Hardware, world_size: int) -> None:
    """Raises UsageError if the machine cannot hold that many ranks."""
    if hardware.on_gpu and world_size > hardware.count:
        raise UsageError(
            f"world size is {world_size}; this machine has {hardware.count} GPUs: "
            f"give --world-size {hardware.count} or less, or --backend cpu"
        )
    if hardware.on_gpu and hardware.count > 1 and hardware.links.startswith("peer access 0/"):
        raise UsageError(
            f"{hardware.count} GPUs that cannot reach each other's memory; peer access is needed: run `autotax doctor`"
        )


def __getattr__(name: str) -> object:
    return former_names.moved(__name__, name)


# Bounds by links, and resources of a software pipeline, for declarations and spaces.

LINK_GBPS = {"NVIDIA H200": 375.0, "NVIDIA H100 80GB HBM3": 375.0}
"""Measured rate at which one device receives from all its peers at once. Other devices are unknown."""

XGMI_GBPS = {"MI300A": 64.0, "MI300X": 64.0, "MI325X": 64.0, "MI350X": 76.8, "MI355X": 76.8}
"""Data-sheet bandwidth, in one direction, of the link between each pair of AMD GPUs of a host. Not measured here."""


def links_us(nbytes: int, peers: int, hardware: Hardware) -> dict[str, float]:
    """The bound `links`: microseconds to receive `nbytes` bytes from `peers` peers; empty where links are unknown."""
    pair = next((rate for name, rate in XGMI_GBPS.items() if name in hardware.device.split()), None)
    rate = pair * max(1, peers) if pair else LINK_GBPS.get(hardware.device)
    return {"links": nbytes / (rate * 1e3)} if rate else {}


def blocks_held(hardware: Hardware, stages: int) -> int:
    """Blocks of operands in shared memory at a time.

    On ROCm one fewer than stages, because registers hold the next block. gfx950 copies it to shared memory itself, from Triton
    3.8 on.
    """
    return stages - 1 if hardware.backend == "rocm" and hardware.target != "hip:gfx950" else stages


def lanes(hardware: Hardware) -> int:
    """Threads of a warp, or of a wavefront on ROCm."""
    return 64 if hardware.backend == "rocm" else 32
