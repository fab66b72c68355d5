"""A timeline of one call, rank by rank: where the call computes, sends and waits.

- CPU ranks: wall clock. Each kernel, each of its programs and each device function that a program calls is a slice. The
  interpreter runs the programs of a rank one after another, so a wait lasts until the peer's program has sent.
- GPUs: the device's clock. Each kernel and each copy is a slice on its stream, as CUPTI (roctracer on AMD) records it. On NVIDIA
  the kernels are stamped (see `device_timestamps`) and slower: each program, each role of its warps, and each device function
  that waits or sends is a slice too, on a track of its warp. The first kernel's begin aligns both clocks. The timeline also holds
  the time of a call without stamps.

Calls are eager, also where a config is deployed in a CUDA graph. On GPUs they are enqueued behind others, as a graph's are, so
that ranks wait for each other's data and not for each other's hosts.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware, check_problems, detect
from autotax.operators import loaded

if TYPE_CHECKING:
    from autotax.runner.device_timestamps import Span, Stamps

WARM_UP = 2
"""Calls before the one that is recorded."""
HOLD_US = 20_000.0
"""How long a GPU is held while its host enqueues the calls."""
DEADLINE_S = 300.0
"""Deadline of the ranks in seconds, their start included."""
KINDS = ("wait", "send", "compute", "kernel", "program", "host")
WAITS, SENDS = re.compile("wait|await(?!ed)|poll|receive"), re.compile("send|signal|tell|announce|publish|push|spread|fetch|copy")
"""Name prefixes of device functions that wait, and of device functions that move data to or from peers."""


@dataclass(frozen=True)
class Slice:
    """An interval of `us` microseconds that begins at `start_us`, on a clock that the ranks of one host share."""

    name: str
    kind: str
    """One of KINDS."""
    track: str
    """Slices of one track nest."""
    start_us: float
    us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


@dataclass(frozen=True)
class Role:
    """Average times of the programs of a kernel, or of the warps of a role in them."""

    name: str
    us: float
    end_us: float
    """The end of the last program, from the begin of the call."""
    send: float
    wait: float
    """`send` and `wait` are shares of their time. Waits for operand buffers are not stamped."""
    longest: str = ""
    """The waits that take longest together, by their name."""


@dataclass(frozen=True)
class Timeline:
    """One call of a config: the slices of each rank, by their beginnings."""

    problem: Problem
    config: Config
    hardware: Hardware
    ranks: tuple[tuple[Slice, ...], ...]
    shipped_us: tuple[float, ...] = ()
    """Microseconds of the same call on each rank without stamps, if the kernels in `ranks` are stamped."""

    @property
    def programs(self) -> bool:
        """Whether programs are shown, and device functions in them."""
        return any(part.kind == "program" for slices in self.ranks for part in slices)

    def share(self, rank: int, kind: str) -> float:
        """The part of the time of a rank's programs that their slices of this kind take; 0 without programs."""
        program = self.us(rank, "program")
        tracks = {part.track for part in self.ranks[rank] if part.kind == "program"}
        return _us([part for part in self.ranks[rank] if part.track in tracks], kind) / program if program else 0.0

    def us(self, rank: int, kind: str) -> float:
        """Microseconds of a rank's call in slices of this kind, nested ones counted once."""
        return _us(self.ranks[rank], kind)

    def roles(self, rank: int) -> list[Role]:
        """Average times of each kernel's programs, and of the warps of each role in them, ordered by their begin."""
        names = {part.track: part.name for part in reversed(self.ranks[rank]) if part.kind == "program"}
        of_role = defaultdict[str, list[Slice]](list)
        for part in self.ranks[rank]:
            if part.track in names:
                of_role[names[part.track]].append(part)
        begin = min((part.start_us for part in self.ranks[rank]), default=0.0)
        return [_role(name, slices, begin) for name, slices in of_role.items()]

    def call_us(self, rank: int) -> float:
        """Microseconds from the first beginning to the last end on a rank."""
        slices = self.ranks[rank]
        return max(part.end_us for part in slices) - min(part.start_us for part in slices) if slices else 0.0


def _us(slices: Sequence[Slice], kind: str) -> float:
    total, ends = 0.0, dict[str, float]()
    for part in slices:
        if part.kind == kind:
            begin = max(part.start_us, ends.get(part.track, 0.0))
            total += max(0.0, part.end_us - begin)
            ends[part.track] = max(part.end_us, ends.get(part.track, 0.0))
    return total


def _role(name: str, slices: Sequence[Slice], begin: float) -> Role:
    program, send, wait = (_us(slices, kind) for kind in ("program", "send", "wait"))
    ends = [part.end_us for part in slices if part.kind == "program"]
    waits: dict[str, float] = defaultdict(float)
    for part in slices:
        if part.kind == "wait":
            waits[part.name] += part.us
    longest = max(waits, key=lambda wait: waits[wait], default="")
    return Role(name, program / len(ends), max(ends) - begin, send / (program or 1.0), wait / (program or 1.0), longest)


def trace(
    problem: Problem,
    *,
    config: Config | None = None,
    conditions: Conditions | None = None,
    db: str | Path | None = None,
    backend: str | None = None,
    programs: bool = True,
) -> Timeline:
    """The timeline of one verified call, on separate ranks: `autotax trace`.

    Args:
        problem: The problem of the call.
        config: The config that runs. Default: the answer of a look-up.
        conditions: The conditions of the look-up. Default: the usual ones on this machine.
        db: The database of the look-up, a path or a URL. Default: yours.
        backend: The kind of ranks: cuda, rocm or cpu. Default: what this machine has.
        programs: Show the programs inside the kernels of NVIDIA GPUs, which slows the kernels. CPU ranks always show them, AMD
            GPUs never.

    Returns:
        The spans of all ranks on one clock.

    Raises:
        UsageError: Bad input, before anything is started.
        MachineError: The ranks failed, or the result is wrong.
    """
    from autotax.db.lookup import lookup
    from autotax.runner.ranks import RankFailure, Ranks
    from autotax.spaces import space_for

    hardware = detect(backend)
    check_problems([problem], hardware)
    if config is None:
        answer = lookup(problem, hardware=hardware, db=db, conditions=conditions)
        config = Config(answer.variant, answer.params)
    if why_not := space_for(problem, hardware).why_not(config):
        raise UsageError(f"config is {config}; it cannot be used for {problem.key}: {why_not}")

    def slices(ranks: Ranks, stamped: bool) -> tuple[tuple[Slice, ...], ...]:
        try:
            return tuple(ranks.run(slices_of_rank, problem, config, hardware, stamped, timeout=DEADLINE_S))
        except RankFailure as failure:
            last = " ".join(str(failure).strip().splitlines()[-1].split())
            hint = "; kernels alone can be traced with --kernels" if stamped else ""
            raise MachineError(f"{config} could not be traced for {problem.key}: {last}{hint}") from failure

    with Ranks(problem.world_size, hardware.backend, loaded()) as ranks:
        timeline = Timeline(problem, config, hardware, slices(ranks, False))
        if not programs or hardware.backend != "cuda":
            return timeline
        as_shipped = tuple(timeline.call_us(rank) for rank in range(problem.world_size))
        return Timeline(problem, config, hardware, slices(ranks, True), as_shipped)


def slices_of_rank(world: Any, problem: Problem, config: Config, hardware: Hardware, stamped: bool) -> tuple[Slice, ...]:
    """One recorded call on this rank. Collective. Raises RuntimeError for a wrong result and for a wait that gave up."""
    from autotax.kernels import prepare
    from autotax.kernels.offline import fix_cache_keys
    from autotax.operators.verification import make_inputs, reference, relative_error, tolerance
    from autotax.runner.device_timestamps import Stamps, stamping
    from autotax.runner.local_runner import heap_bytes
    from autotax.runner.rank_worker import open_context

    if hardware.on_gpu:
        fix_cache_keys()
    context = open_context(world, hardware, heap_bytes(hardware))
    inputs = make_inputs(problem, 0, world.rank, world.device)
    operator = prepare(problem, config, context)
    context.heap.check()

    def call() -> Any:
        result = operator(*inputs.tensors, inputs.out)
        return inputs.out if result is None else result

    stamps = Stamps(world.device) if stamped else None
    with stamping(stamps, is_stamped) if stamps else nullcontext():
        with context.rehearsal():
            call()
        for _ in range(WARM_UP):
            world.barrier()
            call()
            world.synchronize()
        result, slices = _interpreted(call, context) if context.interpreted else on_gpu(call, context, stamps)
    world.barrier()
    if failure := operator.failure():
        raise RuntimeError(failure)
    error = relative_error(result, reference(problem, 0, world.rank, world.device))
    if not error <= tolerance(problem):
        raise RuntimeError(f"the result is wrong: relative error {error:.3g}")
    context.heap.close()
    if stamps:
        slices += inside(*stamps.spans(), slices)
    return tuple(sorted(slices, key=lambda part: (part.start_us, -part.us)))


def kind_of(function: str) -> str:
    """The kind of a device function, guessed from its name."""
    name = function.lstrip("_")
    return "wait" if WAITS.match(name) else "send" if SENDS.match(name) else "compute"


def is_stamped(function: str) -> bool:
    """Whether calls of a device function are slices of a stamped kernel: those that wait or send."""
    return kind_of(function) != "compute"


def inside(spans: Sequence[Span], lost: int, kernels: Sequence[Slice]) -> list[Slice]:
    """Slices inside the kernels, moved to the clock of `kernels`, which are slices of the same call."""
    launches = [launch for launch in kernels if launch.kind == "kernel"]
    spans = [span for span in spans if any(span.kernel in launch.name for launch in launches)]  # without the delay kernel
    if not spans:
        return []
    first = min(spans, key=lambda span: span.begin_ns)
    begins = [launch.start_us for launch in launches if first.kernel in launch.name]
    ahead = first.begin_ns / 1e3 - min(begins, default=0.0)
    slices = [
        Slice(
            span.function or span.kernel,
            "program" if span.role or not span.function else kind_of(span.function),
            f"{span.kernel} {span.program} on processor {span.processor}, warp {span.warp}",
            span.begin_ns / 1e3 - ahead,
            (span.end_ns - span.begin_ns) / 1e3,
        )
        for span in spans
    ]
    if lost:
        slices.append(Slice(f"{lost} records found no room", "host", "lost", max(launch.end_us for launch in slices), 0.0))
    return slices


def _interpreted(call: Callable[[], Any], context: Any) -> tuple[Any, list[Slice]]:
    """The result of a call on this CPU rank, and its slices."""
    slices: list[Slice] = []
    context.world.barrier()
    with _recording(slices, context):
        return call(), slices


@contextmanager
def _recording(slices: list[Slice], context: Any) -> Iterator[None]:
    """Records kernels, programs and device functions of Triton's interpreter in this process, on the clock of the host."""
    from triton.runtime import interpreter

    track, program = "host", ("", 0.0)

    def now() -> float:
        return time.perf_counter_ns() / 1e3

    def note(name: str, kind: str, began: float) -> None:
        slices.append(Slice(name, kind, track, began, now() - began))

    def end_program() -> None:
        nonlocal program, track
        if program[0]:
            note(program[0], "program", program[1])
        program, track = ("", 0.0), "host"

    def set_index(*index: int) -> None:
        nonlocal program, track
        end_program()
        usual_index(*index)
        track = f"program {','.join(map(str, index))}"
        program = (track, now())

    def device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return usual_call(function, *args, **kwargs)
        finally:
            note(function.__name__, kind_of(function.__name__), began)

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return original(*args, **kwargs)
            finally:
                end_program()
                label = getattr(args[0], "__name__", name) if name == "launch" else name
                note(label, "kernel" if name == "launch" else "compute" if name == "matmul" else "send", began)

        return call

    builder, function = interpreter.interpreter_builder, interpreter.InterpretedFunction
    usual_index, usual_call = builder.set_grid_idx, function.__call__
    names = ("launch", "copy", "all_gather", "all_to_all", "matmul")
    builder.set_grid_idx, function.__call__ = set_index, device_function
    for name in names:
        setattr(context, name, recorded(name, getattr(context, name)))
    began = now()
    try:
        yield
    finally:
        track = "host"
        note("call", "host", began)
        function.__call__ = usual_call
        del builder.set_grid_idx
        for name in names:
            delattr(context, name)


def on_gpu(call: Callable[[], Any], context: Any, stamps: Stamps | None) -> tuple[Any, list[Slice]]:
    """The result of the last of some calls on this rank's GPU, and its kernels and copies, by torch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from autotax.kernels.alignment import delay, delay_kernel

    delay(context, 1.0)
    context.world.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # starting it takes each rank another time
        context.world.barrier()
        delay(context, HOLD_US)
        for _ in range(WARM_UP):
            call()
        if stamps:
            stamps.clear()
        delay(context, 0.0)  # marks the begin of the last call
        result = call()
        context.world.synchronize()
    events = [entry for entry in profiler.profiler.kineto_results.events() if entry.device_type() != DeviceType.CPU]
    marks = [entry.start_ns() + entry.duration_ns() for entry in events if delay_kernel.__name__ in entry.name()]
    if not marks:
        raise RuntimeError("torch's profiler recorded no kernels of this GPU: see that CUPTI, or roctracer, works here")
    begin = max(marks)
    slices = []
    for event in events:
        if event.start_ns() >= begin and event.duration_ns():
            name = event.name()
            kind = "send" if name.startswith(("Memcpy", "nccl", "rccl")) else "kernel"
            track = f"stream {event.device_resource_id()}"
            slices.append(Slice(name, kind, track, event.start_ns() / 1e3, event.duration_ns() / 1e3))
    return result, slices


def chrome(timeline: Timeline) -> dict[str, Any]:
    """The timeline as Perfetto and chrome://tracing read it: a process for each rank, a thread for each track."""
    begins = min((part.start_us for slices in timeline.ranks for part in slices), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, slices in enumerate(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        tracks = sorted({part.track for part in slices}, key=lambda track: (track != "host", len(track), track))
        for thread, track in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": track}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}})
            events += [
                {
                    "ph": "X", "name": part.name, "cat": part.kind, "pid": rank, "tid": thread, "ts": part.start_us - begins,
                    "dur": part.us,
                }
                for part in slices if part.track == track
            ]  # fmt: skip
    on_gpu = timeline.hardware.on_gpu
    shown = "kernels, programs and device functions" if timeline.programs else "kernels and copies"
    about = {
        "problem": timeline.problem.key,
        "config": str(timeline.config),
        "hardware": str(timeline.hardware),
        "clock": "device" if on_gpu else "wall clock of CPU ranks, which says nothing about GPUs",
        "shown": f"{shown} of one eager call",
        "as_shipped_us": list(timeline.shipped_us),
        "categories": "by the names of kernels and device functions",
    }
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}
