"""How many files of autotax a reader passes through to follow one trial, one look-up or one call:

    python results/runtime/flows.py [--calls]

Counted are the functions of autotax that Python calls while a flow runs, in the process and on the threads of the flow. A file
counts if one of its functions runs. A hop is a call of a function in another file than the last function of autotax on the stack;
frames of other packages in between do not matter. `hops` counts the distinct pairs of caller and callee, which are the jumps of a
reader; `calls` counts every one of these calls that was made. Generators count when they are resumed, like functions.

- trial: the second trial of a problem in the tuner's process, on two CPU ranks, from the report of the first trial to its own.
- look-up: the first `autotax.lookup` of a process, which `import autotax` precedes. What imports run is left out: the bodies of
  modules, and finders. `imported` counts the modules that are imported until the answer is there.
- call: the third call of `AllGatherLinear` with the same shape and a kernel, on the first of two CPU ranks.

`--calls` lists the files with the calls into each, then the hops.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'autotax'}{os.sep}"
IMPORTS = "<frozen importlib._bootstrap>"
FLOWS = ("trial", "look-up", "call")
Function = tuple[str, str]
"""File below autotax/ and qualified name."""


class Trace:
    """The calls of functions of the package between `start` and `stop`, by caller and callee."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[Function | None, Function]] = Counter()
        self._names: dict[CodeType, Function | None] = {}

    def start(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def summary(self) -> dict[str, Any]:
        into = Counter[str]()
        hops = Counter[tuple[Function, Function]]()
        for (caller, callee), count in self.calls.items():
            into[callee[0]] += count
            if caller and caller[0] != callee[0]:
                hops[caller, callee] += count
        return {
            "files": len(into), "hops": len(hops), "calls": hops.total(),
            "imported": sum(name.partition(".")[0] == "autotax" for name in sys.modules),
            "into": into.most_common(), "hop": [[":".join(a), ":".join(b), n] for (a, b), n in hops.most_common()],
        }  # fmt: skip

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not (callee := self._function(frame.f_code)):
            return
        callers: list[Function] = []
        above = frame.f_back
        while above:
            if function := self._function(above.f_code):
                callers.append(function)
            importing = above.f_code.co_filename == IMPORTS or above.f_code.co_name == "<module>"
            above = above.f_back
            if importing and above:  # without a frame above, it is the script
                return
        if callee[1] != "<module>":
            self.calls[callers[0] if callers else None, callee] += 1

    def _function(self, code: CodeType) -> Function | None:
        """The function of the package whose code this is; that around it for comprehensions and lambdas. None for others."""
        if code not in self._names:
            name = code.co_qualname.partition(".<locals>.<")[0]
            inside = code.co_filename.startswith(PACKAGE)
            self._names[code] = (code.co_filename.removeprefix(PACKAGE), name) if inside else None
        return self._names[code]


def trial() -> dict[str, Any]:
    import autotax
    from autotax.tuner import Progress

    trace = Trace()

    def watch(progress: Progress) -> None:
        if progress.done == 1:
            trace.start()
        elif progress.done == 2:
            trace.stop()

    problem = autotax.AllGatherGemm(m=16, n=16, k=16, world_size=2, dtype="fp32")
    with tempfile.TemporaryDirectory() as folder:
        autotax.tune(problem, trials=3, backend="cpu", db=Path(folder) / "trial.db", soak=0, on_progress=watch)
    return trace.summary()


def look_up() -> dict[str, Any]:
    import autotax

    trace = Trace()
    problem = autotax.AllGatherGemm(m=512, n=7168, k=8192, world_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trace.start()
        autotax.lookup(problem, db=Path(folder) / "none.db")
        trace.stop()
        return trace.summary()


def call() -> dict[str, Any]:
    from autotax.runner.ranks import run_ranks

    return dict(run_ranks(_call_on_rank, 2)[0])


def _call_on_rank(_: object) -> dict[str, Any]:
    import torch

    import autotax
    from autotax.hardware import detect
    from autotax.nn import AllGatherLinear
    from autotax.spaces import space_for

    trace = Trace()
    x, weight = torch.randn(16, 16), torch.randn(16, 16)
    problem = autotax.AllGatherGemm(m=32, n=16, k=16, world_size=2, dtype="fp32")
    with torch.no_grad():
        layer = AllGatherLinear(weight, None, 32, sizes=[32], config=space_for(problem, detect("cpu")).default("push"))
        for _ in range(2):
            layer(x)
        trace.start()
        layer(x)
        trace.stop()
    layer.close()
    return trace.summary()


RUNS: dict[str, Callable[[], dict[str, Any]]] = dict(zip(FLOWS, (trial, look_up, call), strict=True))


def traced(flow: str) -> dict[str, Any]:
    """Traces a flow in a process of its own."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    output = subprocess.check_output([sys.executable, __file__, "--flow", flow], env=variables, text=True)
    return dict(json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="files of autotax, and hops between them, of a trial, a look-up and a call")
    parser.add_argument("--calls", action="store_true", help="list files and hops")
    parser.add_argument("--flow", choices=FLOWS, help="trace this flow in this process, and print JSON")
    options = parser.parse_args()
    if options.flow:
        print(json.dumps(RUNS[options.flow]()))
        return
    for flow in FLOWS:
        trace = traced(flow)
        imported = f", {trace['imported']} modules imported" if flow == "look-up" else ""
        print(f"{flow}: {trace['files']} files, {trace['hops']} hops, {trace['calls']} calls between files{imported}")
        if options.calls:
            for file, count in trace["into"]:
                print(f"  {count:6} {file}")
            for caller, callee, count in trace["hop"]:
                print(f"  {count:6} {caller} -> {callee}")


if __name__ == "__main__":
    main()
