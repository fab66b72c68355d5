"""How figures, problems and configs are spelled, in tables and while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware

CPU_NOTE = "CPU ranks on the Triton interpreter: these figures say nothing about GPUs"

STATUS_STYLES = {"ok": "green", "pruned": "cyan", "infeasible": "yellow"}
FAILED_STYLE = "red"


def style_of(status: str) -> str:
    return STATUS_STYLES.get(status, FAILED_STYLE)


def title(problem: Problem) -> str:
    """`all-gather-gemm m=512 n=7168 k=8192 dtype=bf16 shard=m world_size=4`"""
    return " ".join([problem.op, *(f"{name}={value}" for name, value in problem.to_dict().items() if name != "op")])


def place(hardware: Hardware) -> str:
    """Where figures come from; those of CPU ranks are never without their warning."""
    return str(hardware) if hardware.on_gpu else CPU_NOTE


def deployed(conditions: Conditions) -> str:
    """`calls in place, cold L2`, `graph calls, cold L2, back to back`, `eager calls, cold L2, ranks up to 20 us apart`"""
    apart = f", ranks up to {conditions.skew_us:g} us apart" if conditions.skew_us else ""
    calls = "calls in place" if conditions.in_place else f"{conditions.mode} calls"
    behind = ", back to back" if conditions.mode == "graph" and not apart else ""
    return f"{calls}, {conditions.l2} L2{behind}{apart}"


def heading(problem: Problem, hardware: Hardware, conditions: Conditions) -> str:
    """What must be the same for the figures of several problems to make one table."""
    return f"{problem.op}, {number(problem.world_size, 'rank')}: {place(hardware)}; {deployed(conditions)}"


def unusual(conditions: Conditions, hardware: Hardware) -> str:
    """The conditions, or nothing where they are the usual ones."""
    return "" if conditions == Conditions.usual(hardware.on_gpu) else f"tuned for {deployed(conditions)}"


def accounts(found: Mapping[str, float], hardware: Hardware) -> str:
    """Where the time of a run went, in one line."""
    seconds, devices = found["seconds"], "GPUs" if hardware.on_gpu else "CPU ranks"
    shares = {"compiling": "compile_s", "ranks' host work": "ranks_s", "tuner and database": "tuner_s"}
    parts = ", ".join(f"{name} {share(found[key] / seconds)}" for name, key in shares.items())
    trials = number(round(found["trials"]), "trial")
    searched = f"{trials} in {duration(found['search_s'])}, {found['trials_per_minute']:.0f} a minute"
    idle = f"{devices} idle at least {share(found['idle_share'])} of it"
    return f"{searched}; with the finalists {duration(seconds)}, {idle} ({parts})"


def share(part: float) -> str:
    """`61 %`"""
    return f"{100 * part:.0f} %"


def won(part: float | None) -> str:
    """`61 %`; all of it where even less than the work was needed, for the work is told by something else, a copy for instance."""
    return "-" if part is None else "all" if part >= 1 else share(part)


def microseconds(value: float | None) -> str:
    """Four digits or so: `38.41`, `512.3`, `12,345`."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0
    return f"{value:,.{digits}f}"


def times(speedup: float | None) -> str:
    """`1.31x`"""
    return "-" if speedup is None else f"{speedup:.2f}x"


def faster(speedup: float | None, than: str = "BSP") -> str:
    """`1.31x faster than BSP`, `1.05x slower than BSP`, `as fast as BSP`"""
    if speedup is None:
        return "-"
    if times(speedup) == times(1.0):
        return f"as fast as {than}"
    return f"{times(max(speedup, 1 / speedup))} {'faster' if speedup > 1 else 'slower'} than {than}"


def interval(ends: tuple[float, float]) -> str:
    """`[1.28, 1.33]`"""
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def duration(seconds: float) -> str:
    """`0:09`, `12:34`, `1:02:03`"""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parameters(config: Config) -> str:
    """`block_m=128 block_n=256`, or a dash where there are none."""
    return " ".join(f"{name}={value}" for name, value in config.params) or "-"


def number(count: int, noun: str) -> str:
    """`1 trial`, `3 trials`"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counts(statuses: Mapping[str, int]) -> str:
    """`18 ok, 3 pruned, 1 hang`"""
    return ", ".join(f"{count} {status}" for status, count in statuses.items()) or "none"
