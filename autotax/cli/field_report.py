"""The report of `autotax doctor --report FILE`: facts that a developer without the machine needs, and nothing private."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotax import __version__
from autotax.core.errors import MachineError, UsageError
from autotax.hardware import Hardware, detect
from autotax.operators import operators
from autotax.software import distribution_version, environment

if TYPE_CHECKING:
    from autotax.heap import World
    from autotax.runner import Measurement

FORMAT = 1
PACKAGES = ("torch", "triton", "pytorch-triton-rocm", "tokenspeed-iris", "iris", "tokenspeed-tritonblas", "optuna", "numpy")
VARIABLES = (
    "AUTOTAX_HEAP", "AUTOTAX_ROCM_HEAP", "AUTOTAX_ONLY_OURS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES",
    "GPU_MAX_HW_QUEUES", "HIP_VISIBLE_DEVICES", "HSA_ENABLE_SDMA", "HSA_NO_SCRATCH_RECLAIM", "IRIS_LOG_LEVEL", "NCCL_PROTO",
    "ROCR_VISIBLE_DEVICES", "TRITON_DEFAULT_FP_FUSION", "TRITON_INTERPRET",
)  # fmt: skip
"""The environment variables whose values are written; no other is."""
PLAIN = re.compile(r"[\w.,:+-]{1,60}")
"""Values of variables; any other is written as `set`."""
DRIVERS = {"amdgpu": "/sys/module/amdgpu/version", "rocm": "/opt/rocm/.info/version", "nvidia": "/sys/module/nvidia/version"}
WORDS = 1024
"""Words that each rank stores to each peer, to prove the heap."""
HEAP_BYTES = 1 << 20
WITHIN_S = 300.0
"""Seconds that the trials may take, compilation included."""


def collect(backend: str | None, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole report. Ranks start, prove their heap, and run the first operator's example. Takes up to WITHIN_S seconds.

    A part that fails holds its error in one line.
    """
    started = time.perf_counter()
    report: dict[str, Any] = {
        "format": FORMAT,
        "autotax": __version__,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "drivers": {name: text for name, path in DRIVERS.items() if (text := _text_of(Path(path)))},
        "packages": {name: version for name in PACKAGES if (version := distribution_version(name))},
        "variables": {name: value if PLAIN.fullmatch(value) else "set" for name in VARIABLES if (value := os.environ.get(name))},
        "checks": [check for check in checks if check["name"] != "database"],  # it names servers, users and folders
    }
    try:
        hardware = detect(backend)
        report["hardware"] = hardware.to_dict()
        report["software"] = environment(hardware.backend).to_dict()
        report["trials"], report["seconds_to_first_verified_trial"] = _trials(hardware, started)
        report["heap"] = _heap(hardware)
    except (UsageError, MachineError) as error:
        report["error"] = str(error)
    report["seconds"] = round(time.perf_counter() - started, 1)
    return dict(private_out(report))


def private_out(value: Any) -> Any:
    """The value without home directories, names of users and of this host in its texts."""
    if isinstance(value, dict):
        return {name: private_out(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [private_out(inner) for inner in value]
    if not isinstance(value, str):
        return value
    for home in {str(Path.home()), os.environ.get("HOME", "")} - {"", "/"}:
        value = value.replace(home, "~")
    value = re.sub(r"/(home|Users)/[^/\s:'\"]+|/root(?=[/\s:'\"]|$)", "~", value)
    return value.replace(platform.node(), "host") if len(platform.node()) > 3 else value


def _text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()[:60]
    return ""


def _trials(hardware: Hardware, started: float) -> tuple[list[dict[str, Any]], float | None]:
    """BSP and the first seed of each variant of the first operator's example (on CPU ranks of one variant), and the seconds from
    `started` to the first figure of ours that was verified.
    """
    from autotax.api import ranks
    from autotax.core.conditions import Conditions
    from autotax.runner.measurement import Candidate, Effort, TimeIsUp
    from autotax.spaces import space_for

    operator = next(iter(operators().values()))
    problem = replace(operator.examples[hardware.on_gpu], world_size=hardware.default_world_size)
    space, conditions = space_for(problem, hardware), Conditions.usual(hardware.on_gpu)
    searched = [name for name in space.variants if operator.variants[name].role == "search"]
    names = [*searched[:1], "bsp", *searched[1:]] if hardware.on_gpu else [*searched[:1], "bsp"]
    until = time.monotonic() + WITHIN_S
    rows, first = list[dict[str, Any]](), None
    with ranks(hardware, problem.world_size) as runner:
        runner.expect(problem, [space.default(name) for name in names])
        for name in names:
            effort = Effort(samples=20, seconds=0.3, within_s=until - time.monotonic())
            try:
                [measured] = runner.measure(problem, [Candidate(space.default(name), conditions)], effort)
            except TimeIsUp:
                rows.append({"variant": name, "status": "not measured", "error": f"the trials took {WITHIN_S:.0f} s"})
                continue
            if first is None and measured.status == "ok" and name != "bsp":
                first = round(time.perf_counter() - started, 1)
            rows.append({"problem": problem.key} | _of(measured))
    return rows, first


def _of(measured: Measurement) -> dict[str, Any]:
    us = measured.latency_us
    return {
        "variant": measured.config.variant,
        "params": dict(measured.config.values),
        "status": measured.status,
        "error": measured.error,
        "latency_us": us and round(us, 2),
        "back_to_back_us": (alone := measured.back_to_back_us) and round(alone, 2),
        "relative_error": measured.relative_error,
        "compile_s": round(measured.compile_s, 2),
    }


def _heap(hardware: Hardware) -> dict[str, Any]:
    """The library and allocator of the ranks' heap, and whether each rank reads the words that its peers stored."""
    from autotax.runner.ranks import RankFailure, run_ranks

    try:
        answers = run_ranks(prove_heap, hardware.default_world_size, hardware.backend, timeout=120)
    except RankFailure as failure:
        return {"proved": False, "error": str(failure).strip().splitlines()[-1][:400]}
    return {"proved": all(answer.pop("right") for answer in answers), **answers[0]}


def prove_heap(world: World) -> dict[str, Any]:
    """Opens the heap, stores words to all peers, and compares the words of the peers. Collective."""
    import torch

    from autotax.heap import open_heap

    started = time.perf_counter()
    with contextlib.closing(open_heap(world, HEAP_BYTES)) as heap:
        opened = time.perf_counter() - started
        inbox = heap.zeros((world.size, WORDS), torch.int32)
        heap.check()
        words = torch.arange(WORDS, dtype=torch.int32, device=inbox.device)
        for peer in range(world.size):
            heap.peer(inbox, peer)[world.rank].copy_(words + 1000 * world.rank + peer)
        heap.check()
        right = all(bool(inbox[peer].eq(words + 1000 * peer + world.rank).all()) for peer in range(world.size))
        heap.barrier()
        library, allocator = type(heap).__name__, getattr(heap, "allocator", "")
    return {"right": right, "library": library, "allocator": allocator, "ranks": world.size, "open_s": round(opened, 2)}
