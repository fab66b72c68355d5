"""`autotax doctor`: checks the software and hardware that autotax needs, with the next step for each missing part.

The checks change nothing. A check that raises counts as failed.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from autotax.cli.messages import say
from autotax.cli.options import MachineOptions, one_of, word
from autotax.core.errors import INSTALL, MachineError, UsageError
from autotax.core.files import refuse_unwritable, write_whole
from autotax.hardware import (
    BACKENDS,
    HARDWARE_QUEUES,
    KERNEL_DRIVER,
    check_loopback,
    detect,
    dies_by_hip,
    lack_of_rocm,
    symmetric_heap,
)
from autotax.software import distribution_version, iris_version, triton_version

if TYPE_CHECKING:
    from rich.table import Table

HEAP_BYTES = 256 << 20
"""The greatest memory of the heaps of two CPU ranks."""
OPEN_FILES = 256
"""Two ranks need some twenty open files in a process, and each more rank needs some more."""


@dataclass(frozen=True)
class Check:
    """The result of one check. A failed check that is not `needed` is only a note."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True

    @property
    def next(self) -> str:
        """The remedy; empty if none is needed."""
        return "" if self.ok else self.remedy


def examine(backend: str | None = None, db: str | None = None) -> list[Check]:
    """Checks everything that `backend` (default: this machine's) and the database need."""
    one_of("backend", backend, BACKENDS, guess=False)
    target = backend or _backend_present()
    checks: list[Callable[[], Check]] = [_python, _torch, _triton]
    if target == "cpu":
        checks += [_no_gpus, _numpy, _gloo, _loopback, _shared_memory, _connections]
    else:
        checks += [partial(_gpus, target), _peers, _nccl, _loopback]
        checks += [_iris if symmetric_heap(target) == "iris" else _symmetric_memory]
        checks += [_compiler, _connections]
        checks += [_queues, dies] if target == "rocm" else []
    checks += [_open_files, _torch_operators, partial(_database, db)]
    return [_answered(check) for check in checks]


def usable(checks: Sequence[Check]) -> bool:
    return all(check.ok or not check.needed for check in checks)


def _answered(check: Callable[[], Check]) -> Check:
    """Runs a check. An unexpected exception becomes a failed check."""
    try:
        return check()
    except Exception as error:
        name = getattr(check, "func", check).__name__.strip("_").replace("_", " ")
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        other = "mend what this says; torch and the driver must fit each other"
        return Check(name, False, message, INSTALL if isinstance(error, ImportError) else other)


def _backend_present() -> str:
    try:
        torch: Any = importlib.import_module("torch")
        if torch.cuda.is_available():
            return "rocm" if torch.version.hip else "cuda"
        return "rocm" if KERNEL_DRIVER.exists() else "cpu"
    except Exception:
        return "cpu"


def numbers_of(version: str) -> tuple[int, ...]:
    """(3, 6) of 3.6.0+git123"""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


TRIED = {"python": ("3.11", "3.13"), "torch": ("2.11", "2.15"), "triton": ("3.6", "3.9")}
"""The oldest and the newest versions that the tests have passed under: see results/versions."""


def _package(name: str, least: tuple[int, int], version: str | None) -> Check:
    minimum = ".".join(map(str, least))
    if version is None:
        return Check(name, False, "not installed", f"pip install '{name}>={minimum}'")
    return Check(name, numbers_of(version) >= least, _tried(name, version), f"pip install '{name}>={minimum}'")


def _tried(name: str, version: str) -> str:
    """The version, and whether the tests have passed under such versions."""
    first, last = TRIED.get(name, (version, version))
    within = numbers_of(first) <= numbers_of(version) <= numbers_of(last)
    return version if within else f"{version}, not tried: {first} to {last} were"


# Software


def _python() -> Check:
    version = platform.python_version()
    return Check("python", numbers_of(version) >= (3, 11), _tried("python", version), "use Python 3.11 or later")


def _torch() -> Check:
    check = _package("torch", (2, 9), distribution_version("torch"))
    if check.ok:
        importlib.import_module("torch")
    return check


def _triton() -> Check:
    return _package("triton", (3, 6), triton_version())


def _numpy() -> Check:
    """CPU ranks need NumPy: Triton's interpreter computes with it."""
    return _package("numpy", (2, 0), distribution_version("numpy"))


def _gloo() -> Check:
    dist: Any = importlib.import_module("torch.distributed")
    ok = dist.is_available() and dist.is_gloo_available()
    advice = "CPU ranks meet through gloo: install a torch that has it"
    return Check("gloo", ok, "available" if ok else "not in this torch", advice)


def _loopback() -> Check:
    try:
        check_loopback()
    except MachineError as error:
        return Check("loopback", False, "down", str(error))
    return Check("loopback", True, "up")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    advice = f"ulimit -n {OPEN_FILES} (at most {hard} here): many ranks and tests open more"
    return Check("open files", many, f"up to {soft} in a process", advice, needed=False)


def _nccl() -> Check:
    torch: Any = importlib.import_module("torch")
    name = "rccl" if torch.version.hip else "nccl"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return Check(name, False, "not in this torch", f"install a torch that has {name}")
    return Check(name, True, ".".join(map(str, torch.cuda.nccl.version())))


def _symmetric_memory() -> Check:
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return Check("symmetric memory", False, str(error), "pip install 'torch>=2.9'")
    ok = hasattr(module, "rendezvous")
    return Check("symmetric memory", ok, "in torch" if ok else "too old", "pip install 'torch>=2.9'")


def _iris() -> Check:
    from autotax.heap.base import INSTALL

    try:
        module = importlib.import_module("iris")
    except (ImportError, OSError) as error:  # OSError: the module's libraries need ROCm
        return Check("iris", False, " ".join(str(error).split()), f"install ROCm, then `{INSTALL}`")
    ok = hasattr(module, "iris")
    advice = f"another project has this name: `pip uninstall iris`, then `{INSTALL}`"
    return Check("iris", ok, iris_version() or "of unknown version", advice)


def _compiler() -> Check:
    """Triton contains ptxas and LLVM, but builds its launchers with the C compiler of the machine."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    advice = "install gcc or clang, or name one in $CC; nvcc and ptxas are not needed"
    return Check("C compiler", bool(compiler), compiler or "none", advice)


def _connections() -> Check:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    advice = f"`unset {name}`: copies would wait for kernels, and the copy-engine variant lose"
    return Check(name, value is None, "unset" if value is None else value, advice, needed=value == "1")


def _queues() -> Check:
    name = "GPU_MAX_HW_QUEUES"
    value = os.environ.get(name)
    ok = value is not None and value.isdigit() and int(value) >= HARDWARE_QUEUES
    reason = "copies could stay behind the kernels that wait for them"
    advice = f"`export {name}={HARDWARE_QUEUES}` where modules run; tuning sets it by itself. With fewer {reason}"
    return Check(name, ok, value or "unset", advice, needed=value is not None)


# Machine


def dies() -> Check:
    """The order of programs depends on the number of dies, which is computed from the number of compute units."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Check("dies", True, "no GPU to ask")
    counted, reported = detect("rocm").dies, dies_by_hip()
    if reported is None:
        return Check("dies", True, f"{counted} by the compute units; HIP does not tell")
    advice = "orders of programs are made for another number of dies: report this GPU"
    return Check("dies", reported == counted, f"{reported} by HIP, {counted} by the compute units", advice, needed=False)


def _gpus(backend: str) -> Check:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available() or bool(torch.version.hip) != (backend == "rocm"):
        lack = lack_of_rocm() if backend == "rocm" else None
        if lack and not torch.cuda.is_available():
            return Check("GPUs", False, lack[0], f"{lack[1]}, or tune CPU ranks: --backend cpu")
        advice = f"install the driver and a torch for {backend}, or tune CPU ranks: --backend cpu"
        return Check("GPUs", False, f"torch {torch.__version__} sees none of {backend}", advice)
    count = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory >> 30
    devices = f"{count} x {torch.cuda.get_device_name(0)}, {memory} GiB each"
    return Check("GPUs", count > 1, devices, "communication needs a second GPU", needed=False)


def _no_gpus() -> Check:
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_available():
        return Check("GPUs", True, f"{torch.cuda.device_count()}, not asked for")
    advice = "CPU ranks prove kernels and show how tuning goes; for figures run on two or more GPUs"
    return Check("GPUs", False, f"torch {torch.__version__} sees none", advice, needed=False)


def _peers() -> Check:
    torch: Any = importlib.import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if not pairs:
        return Check("peer access", True, "no pair of GPUs")
    reach = sum(bool(torch.cuda.can_device_access_peer(a, b)) for a, b in pairs)
    advice = "see `nvidia-smi topo -p2p rw` or `rocm-smi --showtopoaccess`; IOMMU or ACS may forbid it"
    return Check("peer access", reach == len(pairs), f"{reach} of {len(pairs)} pairs", advice)


def _shared_memory() -> Check:
    """CPU ranks keep their heaps in anonymous memory files, which need no room in /dev/shm."""
    try:
        fd = os.memfd_create("autotax-doctor")
    except (AttributeError, OSError) as error:
        return Check("shared memory", False, f"no memory files ({error})", "CPU ranks need Linux: run them there")
    try:
        os.ftruncate(fd, HEAP_BYTES)
        with mmap.mmap(fd, HEAP_BYTES), Path(f"/proc/{os.getpid()}/fd/{fd}").open("rb"):
            return Check("shared memory", True, f"memory files of {HEAP_BYTES >> 20} MiB")
    except (OSError, ValueError) as error:
        return Check("shared memory", False, str(error), "mount /proc and allow the process more memory")
    finally:
        os.close(fd)


def _torch_operators() -> Check:
    """Whether `autotax.torch.install` can replace torch's fused operators, and which it has replaced in this process."""
    from autotax.torch import status
    from autotax.torch.registration import ALL, lack

    lacks = [f"{name}: {why}" for name in ALL if (why := lack(name))]
    counted = status()
    summary = f"{len(ALL) - len(lacks)} of {len(ALL)} can be served"
    if "autotax" in counted.operators.values():
        reasons = dict.fromkeys(call.reason for call in counted.calls if not call.taken)
        summary = "; ".join([f"{summary}, {counted.taken} of {counted.taken + counted.left} calls were", *reasons])
    return Check("torch operators", not lacks, summary, f"{'; '.join(lacks)}: torch's own run there", needed=False)


def _database(db: str | None) -> Check:
    from autotax.db.store import Store
    from autotax.db.url import resolve_url, shown, sqlite_path

    try:
        url = resolve_url(db)
        with Store.open(url, create=False) as store:
            state = f"{store.counts()['trials']} trials" if store.exists else "not there yet"
    except (UsageError, MachineError) as error:
        return Check("database", False, "cannot be used", str(error))
    description = f"{shown(url)}, {state}"
    if (path := sqlite_path(url)) and not _may_write(path):
        return Check("database", False, f"{description}, not writable", "give another --db or AUTOTAX_DB")
    return Check("database", True, description)


def _may_write(path: Path) -> bool:
    """Whether a file can be written, or created with its folders."""
    from autotax.db.connection import may_write

    if path.exists():
        return may_write(path)
    nearest = next(folder for folder in path.parents if folder.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


@dataclass(frozen=True)
class DoctorOptions:
    """A file for developers who lack the machine."""

    PANEL: ClassVar[str] = "Report"

    report: Annotated[
        Path | None,
        word("Also run ranks and trials, for minutes at most, and write all that a developer needs to this JSON file.", "FILE"),
    ] = None

    def check(self) -> None:
        if self.report is not None:
            refuse_unwritable(self.report)


def doctor(onto: DoctorOptions, where: MachineOptions) -> int:
    """Check this machine: what it has, what it lacks, and the next step for each."""
    checks = examine(where.backend, where.db)
    where.show(lambda: _table(checks))
    if onto.report is not None:
        from autotax.cli import field_report

        report = field_report.collect(where.backend, _documents(checks))
        write_whole(onto.report, json.dumps(report, indent=2) + "\n")
        say(f"wrote {onto.report}: read it, then send it to the developers")
    return where.answer(None, lambda: _documents(checks), ok=usable(checks))


def _table(checks: Sequence[Check]) -> Table:
    from rich.text import Text

    from autotax.report.formatting import columns, grid

    table = grid("autotax doctor")
    columns(table, "|", "check|", "found", "next step")
    for check in checks:
        mark, style = ("ok", "green") if check.ok else ("lacks", "bold red") if check.needed else ("note", "yellow")
        table.add_row(Text(mark, style), check.name, Text(check.found), Text(check.next))
    return table


def _documents(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [{"name": c.name, "ok": c.ok, "needed": c.needed, "found": c.found, "next": c.next or None} for c in checks]
