"""The software that decides how fast a kernel runs. `environment()` describes the installed versions."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
import runpy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotax.digests import kernel_digest
from autotax.hardware import Described, symmetric_heap


@dataclass(frozen=True)
class Environment(Described):
    """The software that decides how fast a kernel runs. `comm` names the library behind symmetric memory and collectives."""

    python: str
    torch: str
    triton: str
    comm: str
    kernels: str
    """Digest of all kernel sources of a run. Staleness is decided by the digest of the variant's sources alone."""


def distribution_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed; None if none is."""
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def iris_version() -> str | None:
    """The version of Iris, which the package index calls tokenspeed-iris; None if it is not installed."""
    return distribution_version("tokenspeed-iris", "iris")


@functools.cache
def torch_version() -> str:
    """`torch.__version__`, read from torch's file without importing torch, which takes seconds. The version in pip's metadata
    lacks the build. `none` without torch.
    """
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return "none"
    version: str = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
    return version


def triton_version() -> str | None:
    """`triton.__version__`, read from its file, because wheels for ROCm have other distribution names. None if Triton is not
    installed.
    """
    spec = importlib.util.find_spec("triton")
    if not spec or not spec.origin:
        return None
    match = re.search(r"""^__version__\s*=\s*['"]([^'"]+)""", Path(spec.origin).read_text(), re.MULTILINE)
    return match[1] if match else None


def _nccl_version() -> str:
    """The version of NCCL or RCCL in torch. A build of torch for CPUs has none, but may still look up configs of another machine.
    """
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch._C, "_nccl_version") else "none"


@functools.cache
def environment(backend: str) -> Environment:
    """The installed software that matters to `backend`."""
    torch = torch_version()
    if backend == "cuda":
        comm = f"torch symmetric memory {torch}, nccl {_nccl_version()}"
    elif backend == "rocm":
        heap = f"iris {iris_version() or 'none'}" if symmetric_heap("rocm") == "iris" else f"torch symmetric memory {torch}"
        comm = f"{heap}, rccl {_nccl_version()}"
    else:
        comm = "shared memory, gloo"
    return Environment(
        python=platform.python_version(),
        torch=torch,
        triton=triton_version() or "none",
        comm=comm,
        kernels=kernel_digest(),
    )
