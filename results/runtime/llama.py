"""A Llama-style stack of layers on autotax.nn against the same on NCCL: one script, one process a rank.

    python results/runtime/llama.py --world-size 4 --layers 4 --db winners.db --json llama.json

Prefill of one sequence, decode steps of several batches over a KV cache that is spread over the ranks along the sequence, and
training steps of one sequence (`--train`, forward and backward, without the optimizer);
both editions with the same random weights, each captured in CUDA graphs, their outputs compared, their replays timed in turn.
Without GPUs (`--backend cpu`, with small sizes) the same runs eagerly, and its times say nothing.

Simplified: no rotary embedding, no embedding, no head; a decode step attends to a full cache and does not append the new token;
the all-gather of the queries and what attends in prefill are the same in both editions. When training, gate and up are one layer,
and the weights of the norms are frozen.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from stack import Sizes
from work import Plan, work

from autotax import AllGatherGemm, FlashDecode, GemmReduceScatter
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db import Store, shipped
from autotax.db.lookup import lookup
from autotax.hardware import Hardware, check_world_size, detect
from autotax.report.formatting import CPU_NOTE, interval, microseconds, parameters, times
from autotax.runner.ranks import RankFailure, run_ranks
from autotax.software import environment
from autotax.spaces import space_for
from autotax.tuner.comparison import baseline_for, trials_here
from autotax.tuner.finalists import speedup

TOLERANCE = {"bf16": 2e-2, "fp32": 1e-4}
"""Greatest ||ours - theirs|| / ||theirs|| of the last layer: both round to the dtype several times a layer, in other places."""


def problems(plan: Plan) -> dict[str, list[Problem]]:
    """The problems that each module asks the look-up for."""
    sizes = plan.sizes
    mlp = sizes.ffn_columns * (1 if plan.halves else 2)

    def gemm(columns: int) -> list[Problem]:
        return [AllGatherGemm(m, columns, sizes.hidden, plan.dtype, "m", sizes.world_size) for m in plan.gathered]

    def rows(inner: int) -> list[Problem]:
        if not plan.row_parallel:
            return []
        scattered = [(m, "scattered") for m in plan.gathered] + [(m, "replicated") for m in plan.few]
        return [GemmReduceScatter(m, sizes.hidden, inner, plan.dtype, output, sizes.world_size) for m, output in scattered]

    return {
        "QKV": gemm(sizes.qkv_columns),
        "gate, up" if plan.halves else "gate and up": gemm(mlp),
        "output projection": rows(sizes.q_columns),
        "down": rows(sizes.ffn_columns),
        "attention": [decode_problem(sizes, batch, plan.dtype) for batch in plan.decode],
        "training": [problem for m in plan.train for problem in _trained(plan, m)],
    }


def _trained(plan: Plan, m: int) -> list[Problem]:
    """Forward and backward of one sequence."""
    sizes = plan.sizes
    columns = [sizes.qkv_columns, 2 * sizes.ffn_columns]
    shared = (plan.dtype, "m", sizes.world_size)
    trained: list[Problem] = [AllGatherGemm(m, n, sizes.hidden, *shared) for n in columns]
    trained += [GemmReduceScatter(m, sizes.hidden, n, plan.dtype, "scattered", sizes.world_size, "kn") for n in columns]
    if plan.row_parallel:
        for inner in (sizes.q_columns, sizes.ffn_columns):
            trained.append(GemmReduceScatter(m, sizes.hidden, inner, plan.dtype, "scattered", sizes.world_size))
            trained.append(AllGatherGemm(m, inner, sizes.hidden, *shared, "kn"))
    return trained


def decode_problem(sizes: Sizes, batch: int, dtype: str) -> FlashDecode:
    return FlashDecode(batch, sizes.q_heads, sizes.kv_heads, sizes.head_dim, sizes.kv_len, dtype, sizes.world_size)


def best_bsp(problem: FlashDecode, hardware: Hardware, db: str | None) -> Config:
    """The best bulk-synchronous config that the database knows, else the default."""
    conditions, space = Conditions.usual(hardware.on_gpu), space_for(problem, hardware)
    answer = lookup(problem, hardware=hardware, db=db)
    with Store.open(db, create=False) as store:
        return baseline_for(answer, store, trials_here(store, space, conditions), space, conditions).config


def promises(plan: Plan, rows: int, decodes: bool, hardware: Hardware) -> dict[str, float]:
    """Microseconds that the winners of each module of a layer save over BSP, by the figures that they were proven with."""
    with Store.open(plan.db, create=False) as store:
        winners = [*store.winners(with_samples=False), *shipped.winners()]

    def applies(problem: Problem) -> bool:
        if isinstance(problem, FlashDecode):
            return decodes and problem.batch == rows
        output = getattr(problem, "output", "scattered")
        return getattr(problem, "m", None) == rows and (output == "scattered") is plan.sizes.spread(rows)

    def saved(problem: Problem) -> float:
        answer = lookup(problem, hardware=hardware, db=plan.db)
        config = Config(answer.variant, answer.params)
        key = (problem, hardware.device, config)
        proven = [won for won in winners if (won.problem, won.hardware.device, won.config) == key]
        best = max(proven, key=lambda won: won.conditions.mode == "in-place", default=None)
        return best.baseline_us - best.latency_us if best else 0.0

    return {
        name: (2 if name == "gate, up" else 1) * sum(saved(problem) for problem in of_module if applies(problem))
        for name, of_module in problems(plan).items()
        if name != "training"
    }


def reduce(name: str, ranks: Sequence[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """One scenario of all ranks: the time of a round is the maximum over them, a latency the median over the rounds."""
    ours, theirs = ([max(at) for at in zip(*(rank["samples"][which] for rank in ranks), strict=True)] for which in (0, 1))
    ratio, ends = speedup(theirs, ours)
    error = max(error for rank in ranks for error in rank["errors"])
    return {
        "name": name,
        "rows": ranks[0]["rows"],
        "spread": ranks[0]["spread"],
        "autotax_us": statistics.median(ours),
        "nccl_us": statistics.median(theirs),
        "speedup": ratio,
        "interval": list(ends),
        "relative_error": error if math.isfinite(error) else None,
        "tolerance": TOLERANCE[dtype],
        "equal": error <= TOLERANCE[dtype],
        "rounds_us": {"autotax": [round(us, 2) for us in ours], "nccl": [round(us, 2) for us in theirs]},
    }


def document(plan: Plan, hardware: Hardware, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(module, problem) for module, of in problems(plan).items() for problem in of]
    reduced = [
        reduce(of_ranks[0]["name"], of_ranks, plan.dtype) for of_ranks in zip(*(rank["scenarios"] for rank in ranks), strict=True)
    ]
    for scenario in reduced:
        kind = scenario["name"].partition(",")[0]
        if kind != "train":
            promised = promises(plan, scenario["rows"], kind == "decode", hardware)
            scenario["promised_us"] = plan.sizes.layers * sum(promised.values())
            scenario["gained_us"] = scenario["nccl_us"] - scenario["autotax_us"]
    return {
        "hardware": hardware.to_dict(),
        "software": environment(hardware.backend).to_dict(),
        "sizes": asdict(plan.sizes),
        "dtype": plan.dtype,
        "captured": hardware.on_gpu,
        "modules": [
            {
                "module": module,
                "problem": problem.to_dict(),
                "takes": ranks[0]["taken"][problem.key],
                "match": (answer := lookup(problem, hardware=hardware, db=plan.db)).match,
                "reason": answer.reason,
            }
            for module, problem in pairs
        ],
        "baseline": {f"batch {batch}": str(config) for batch, config in plan.bsp.items()},
        "scenarios": reduced,
        "warnings": ranks[0]["warnings"],
        "failures": [failure for rank in ranks for failure in rank["failures"]],
    }


def show(document: dict[str, Any], console: Console, note: str) -> None:
    modules = Table(title="what each module takes, and why", title_justify="left")
    for column in ("module", "problem", "takes", "look-up", "reason"):
        modules.add_column(column, overflow="fold")
    for row in document["modules"]:
        sizes = parameters(Config.of("", row["problem"]))
        modules.add_row(row["module"], sizes, row["takes"], row["match"], row["reason"])
    console.print(modules)
    if all(row["match"] == "fallback" for row in document["modules"]):
        console.print("nothing is tuned here: every module is bulk-synchronous, so there is nothing to win")
    ends = Table(title="end to end", title_justify="left", caption=note, caption_justify="left")
    figures = ("NCCL us", "autotax us", "speed-up [95 %]", "gained us", "promised us")
    for column in ("scenario", *figures, "relative difference", "outputs"):
        ends.add_column(column, justify="left" if column == "scenario" else "right")
    for row in document["scenarios"]:
        error = "not finite" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        both = microseconds(row["nccl_us"]), microseconds(row["autotax_us"])
        gain = f"{times(row['speedup'])} {interval(tuple(row['interval']))}"
        equal = f"{'equal' if row['equal'] else 'DIFFER'} (within {row['tolerance']:g})"
        saved = [microseconds(row[name]) if name in row else "-" for name in ("gained_us", "promised_us")]
        ends.add_row(row["name"], *both, gain, *saved, error, equal)
    console.print(ends)
    for line in (*document["warnings"], *document["failures"]):
        console.print(f"notice: {line}", markup=False)


def planned(options: argparse.Namespace, hardware: Hardware) -> Plan:
    """Raises UsageError for sizes that the ranks cannot share."""
    ranks = options.world_size or hardware.default_world_size
    check_world_size(hardware, ranks)
    for name in ("hidden", "head_dim", "layers", "kv_len", "rounds"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            raise UsageError(f"{name} is {getattr(options, name)}; it must be at least 1: give another --{option}")
    shared = {name: [getattr(options, name)] for name in ("q_heads", "kv_heads", "ffn")}
    shared |= {"prefill": options.prefill, "train": options.train}
    for name, values in shared.items():
        if wrong := [value for value in values if value < 1 or value % ranks]:
            raise UsageError(f"{name} is {wrong[0]}; {ranks} ranks share it: give a multiple as --{name.replace('_', '-')}")
    heads = options.q_heads, options.kv_heads, options.head_dim
    sizes = Sizes(options.hidden, *heads, options.ffn, options.layers, options.kv_len, ranks)
    dtype = "bf16" if hardware.on_gpu else "fp32"
    bsp = {batch: best_bsp(decode_problem(sizes, batch, dtype), hardware, options.db) for batch in options.decode}
    sequences = tuple(options.prefill), tuple(options.decode), tuple(options.train)
    ways = options.gate_up == "two", options.row_parallel == "autotax", options.gathered == "keep"
    return Plan(sizes, dtype, *sequences, options.db, *ways, bsp, options.rounds)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="a Llama-style stack on autotax.nn against the same on NCCL")
    numbers = {"hidden": 8192, "q-heads": 64, "kv-heads": 8, "head-dim": 128, "ffn": 28672, "layers": 4, "kv-len": 32768}
    for name, default in (numbers | {"rounds": 60}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048], help="tokens of a sequence, over all ranks")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16], help="batches")
    parser.add_argument("--train", type=int, nargs="*", default=[], help="tokens of a sequence, forward and backward")
    parser.add_argument("--row-parallel", choices=("autotax", "nccl"), default="autotax", help="output and down projection")
    parser.add_argument("--gathered", choices=("keep", "again"), default="keep", help="for the weights' gradients")
    parser.add_argument("--gate-up", choices=("one", "two"), default="two", help="gate and up: layers of AllGatherLinear")
    parser.add_argument("--world-size", type=int, help="default: the GPUs present, or 2 CPU ranks")
    parser.add_argument("--backend", choices=("cuda", "rocm", "cpu"))
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document, with every sample")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds after which all ranks are killed; default 400")
    return parser


def main() -> int:
    options = arguments().parse_args()
    try:
        hardware = detect(options.backend)
        plan = planned(options, hardware)
        ranks = run_ranks(work, plan.sizes.world_size, hardware.backend, plan, timeout=options.timeout)
    except UsageError as error:
        print(f"llama.py: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"llama.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    report = document(plan, hardware, ranks)
    show(report, Console(width=None if sys.stdout.isatty() else 160), str(hardware) if hardware.on_gpu else CPU_NOTE)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(scenario["equal"] for scenario in report["scenarios"]) and not report["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
