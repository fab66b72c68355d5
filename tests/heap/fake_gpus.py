"""Makes a torch for CPUs act as one for GPUs, as far as Iris goes: memory of a GPU comes from a fake HIP or CUDA library."""

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

from autotax.heap.base import INSTALL

NAMES = {"rocm": ("libamdhip64.so",), "cuda": ("libcuda.so.1", "libcudart.so")}
"""The libraries of each backend. CUDA has two copies of one file; no call to one depends on a call to the other."""
SOURCES = {"rocm": "fake_hip.c", "cuda": "fake_cuda.c"}


def downloaded() -> str:
    """A folder with Iris and what it imports, which pip downloads once for a user; empty without a network."""
    folder = Path(user_cache_path("autotax-tests")) / "iris"
    if not (folder / "iris").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *INSTALL.split()[-2:]]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=True, capture_output=True, timeout=280)
    return str(folder) if (folder / "iris").exists() else ""


def build(folder: Path, backend: str) -> list[Path]:
    """Compiles the libraries of a backend. Raises FileNotFoundError where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise FileNotFoundError("no C compiler")
    for name in NAMES[backend]:
        options = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([compiler, *options, str(Path(__file__).with_name(SOURCES[backend]))], check=True)
    return [folder / name for name in NAMES[backend]]


def install(libraries: list[Path]) -> ctypes.CDLL:
    """Installs the libraries for the rest of this process: every load by their names finds them. Returns the first."""
    first, *_ = [ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL) for library in libraries]
    if hasattr(torch, "_of_fake_gpus"):
        return first
    torch._of_fake_gpus = first  # type: ignore[attr-defined]
    malloc = getattr(first, "hipMalloc", None)  # Iris maps the memory of torch on ROCm only
    if malloc is None:
        torch.cuda.is_available = lambda: True
    else:
        malloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    empty = torch.empty

    def of_device(*size: Any, **options: Any) -> torch.Tensor:
        if not _is_gpu(options.get("device")):
            return empty(*size, **options)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = options.get("dtype") or torch.get_default_dtype()
        nbytes = max(1, math.prod(shape)) * dtype.itemsize
        address = ctypes.c_void_p()
        if malloc is None:
            return empty(shape, **(options | {"device": "cpu"}))
        if malloc(ctypes.byref(address), nbytes) or address.value is None:
            raise torch.OutOfMemoryError(f"HIP out of memory. Tried to allocate {nbytes} bytes")
        return _view(address.value, nbytes).view(dtype).view(tuple(shape))

    def as_tensor(data: Any, *args: Any, **options: Any) -> torch.Tensor:
        interface = getattr(data, "__cuda_array_interface__", None)
        return _view(interface["data"][0], interface["shape"][0]) if interface else plain(data, *args, **options)

    plain = _on_cpu(torch.as_tensor)
    torch.empty = of_device
    torch.as_tensor = as_tensor
    torch.tensor, torch.zeros = _on_cpu(torch.tensor), _on_cpu(torch.zeros)
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    return first


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
