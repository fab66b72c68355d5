"""Carries winners over an edit of the sources that leaves their machine code as it was, byte by byte.

    PYTHONPATH=. python results/carry.py OLD_CHECKOUT WINNERS.json NEW.json OP [VARIANT.PARAMETER=VALUE ...]

A winner of the operator is carried if its kernel sources were those of the old checkout, and if a call enqueues the same in both
checkouts: every launch (kernel, cubin, grid, scalars, shapes of tensors), copy, product and change of stream, in the same order.
It gets the new parameters, and the digests of this checkout's sources and of its machine code with lines, by which ptxas may name
other registers. Other winners stay stale, and are named.

Compiles with the Triton of this Python, and refuses winners of another: an edit may change the code of one Triton alone. Needs no
GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

Winner = dict[str, Any]


def launches(winner: Winner) -> list[str]:
    """The launches of a winner's config, in the checkout that PYTHONPATH names."""
    import torch

    from autotax.core.config import Config
    from autotax.kernels.context import Context
    from autotax.kernels.offline import compile_offline, known_hardware

    try:
        from autotax.operators import problem_from_dict
    except ImportError:  # an old checkout may be from before operators were declared
        from autotax.core.problem import problem_from_dict

    calls: list[str] = []

    def where(tensor: torch.Tensor) -> str:
        return str((tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype))

    class Telling(Context):
        def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            calls.append(f"copy {where(destination)} {where(source)}")

        def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            calls.append(f"matmul {where(a)} {where(b)} {where(out)}")

        @contextlib.contextmanager
        def beside(self, _: Any) -> Iterator[None]:
            calls.append("beside {")
            yield
            calls.append("}")

        def streams(self, count: int, **options: Any) -> list[Any]:
            calls.append(f"streams {count} {options}")
            return super().streams(count, **options)

        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            code = hashlib.sha256(binary.asm["cubin"]).hexdigest()
            there = [arg for arg in args if arg is not None]  # None is no argument of the machine code
            given = [str((tuple(arg.shape), arg.dtype)) if isinstance(arg, torch.Tensor) else repr(arg) for arg in there]
            calls.append(f"{kernel.__name__} {grid} {code} {given}")

    config = Config.of(winner["config"]["variant"], winner["config"]["params"])
    with mock.patch("autotax.kernels.offline.Context", Telling):
        compile_offline(problem_from_dict(winner["problem"]), config, known_hardware(winner["hardware"]["target"]))
    return calls


def launches_of(checkout: str, winners: list[Winner]) -> list[list[str]]:
    # Without the lines of the source, which are all that an edit elsewhere in a file changes.
    before = os.environ.get("PYTHONPATH", "")  # may name another Triton
    env = os.environ | {"PYTHONPATH": f"{checkout}:{before}", "TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}
    command = [sys.executable, __file__, "--launches"]
    asked = subprocess.run(command, input=json.dumps(winners), env=env, text=True, capture_output=True, check=False)
    if asked.returncode:
        raise SystemExit(asked.stderr)
    answer: list[list[str]] = json.loads(asked.stdout)
    return answer


def with_lines(winner: Winner) -> str | None:
    """The digest of the machine code of a winner as calls run it, in this checkout."""
    from autotax.core.config import Config
    from autotax.kernels.offline import known_hardware, resources_offline
    from autotax.kernels.resources import machine_code
    from autotax.operators import problem_from_dict

    config = Config.of(winner["config"]["variant"], winner["config"]["params"])
    hardware = known_hardware(winner["hardware"]["target"])
    return machine_code(resources_offline(problem_from_dict(winner["problem"]), config, hardware))


@functools.cache
def digest(checkout: str, op: str, variant: str) -> str:
    code = f"from autotax.operators.registry import variant_digest; print(variant_digest({op!r}, {variant!r}))"
    return subprocess.check_output([sys.executable, "-c", code], cwd=checkout, text=True).strip()


def main(old: str, source: str, target: str, op: str, *parameters: str) -> None:
    here = str(Path(__file__).resolve().parents[1])
    added: dict[str, dict[str, Any]] = defaultdict(dict)
    for variant, name, value in (re.split("[.=]", entry) for entry in parameters):
        added[variant][name] = int(value) if value.isdigit() else value
    document = json.loads(Path(source).read_text())

    def edited(winner: Winner) -> bool:
        before, now = (digest(checkout, op, winner["config"]["variant"]) for checkout in (old, here))
        return winner["kernel_digest"] == before != now

    mine: list[Winner] = [winner for winner in document["winners"] if winner["problem"]["op"] == op and edited(winner)]
    if others := {winner["environment"]["triton"] for winner in mine} - {here_triton := version("triton")}:
        raise SystemExit(f"winners were proven with Triton {', '.join(others)}, here is {here_triton}: run this with theirs")
    before = launches_of(old, mine)
    configs = [winner["config"] for winner in mine]
    configs = [config | {"params": config["params"] | added[config["variant"]]} for config in configs]
    carried = [winner | {"config": config} for winner, config in zip(mine, configs, strict=True)]
    for winner, new, was, now in zip(mine, carried, before, launches_of(here, carried), strict=True):
        name = f"{winner['config']['variant']} {winner['problem']}"
        if was == now:
            winner |= new | {"kernel_digest": digest(here, op, winner["config"]["variant"])}
            if "machine_code" in winner:
                winner["machine_code"] = with_lines(winner)
            print("carried", name, len(now), "things enqueued")
        else:
            print("DIFFERS", name, was, now)
    Path(target).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--launches"]:
        json.dump([launches(winner) for winner in json.load(sys.stdin)], sys.stdout)
    else:
        main(*sys.argv[1:])
