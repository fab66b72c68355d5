"""Makes a torch for CPUs act as one for ROCm, as far as Iris goes: `cuda` memory comes from a fake HIP library."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from autotax.heap.iris import INSTALL

SOURCE = Path(__file__).with_name("fake_hip.c")
NAME = "libamdhip64.so"


def downloaded() -> str:
    """A folder with Iris and what it imports, which pip downloads once for a user; empty without a network."""
    folder = Path(user_cache_path("autotax-tests")) / "iris"
    if not (folder / "iris").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *INSTALL.split()[-2:]]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
    return str(folder) if (folder / "iris").exists() else ""


def build(folder: Path) -> Path:
    """Compiles the library. Raises FileNotFoundError where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise FileNotFoundError("no C compiler")
    library = folder / NAME
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{NAME}", str(SOURCE), "-o", str(library)], check=True)
    return library


def install(library: Path) -> None:
    """Installs the library for the rest of this process: every load by its name finds this one."""
    hip = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    hip.hipMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    if hasattr(torch, "_of_fake_hip"):
        return
    torch._of_fake_hip = hip  # type: ignore[attr-defined]
    empty = torch.empty

    def of_device(*size: Any, **options: Any) -> torch.Tensor:
        if not _is_gpu(options.get("device")):
            return empty(*size, **options)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = options.get("dtype") or torch.get_default_dtype()
        nbytes = max(1, math.prod(shape)) * dtype.itemsize
        address = ctypes.c_void_p()
        if hip.hipMalloc(ctypes.byref(address), nbytes) or address.value is None:
            raise torch.OutOfMemoryError(f"HIP out of memory. Tried to allocate {nbytes} bytes")
        return _view(address.value, nbytes).view(dtype).view(tuple(shape))

    def as_tensor(data: Any, *args: Any, **options: Any) -> torch.Tensor:
        told = getattr(data, "__cuda_array_interface__", None)
        return _view(told["data"][0], told["shape"][0]) if told else plain(data, *args, **options)

    plain = _on_cpu(torch.as_tensor)
    torch.empty = of_device
    torch.as_tensor = as_tensor
    torch.tensor, torch.zeros = _on_cpu(torch.tensor), _on_cpu(torch.zeros)
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _view(address: int, nbytes: int) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if _is_gpu(options.get("device")):
            options["device"] = "cpu"
        return function(*args, **options)

    return call
