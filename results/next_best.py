"""Ships the next best of the Flash Decode winners whose variant has changed, as far as recorded finalist rounds prove one.

    PYTHONPATH=. python results/next_best.py VARIANT WINNERS.json NEW.json --rounds DATABASE ... --checkouts OLD_CHECKOUT ...

For each winner of VARIANT, the script looks through the databases for finalist rounds of the same problem and conditions,
on the same hardware with the same torch, Triton and communication library. All finalists were verified and soaked, and measured
in turn with BSP. The script decides anew among those of other variants whose configs the space still has, as the tuner does.
One that beats BSP takes the winner's place if today's sources compile it to the machine code of then, byte by byte (see
`carry.py`); an old checkout must have the kernel digest of its trial. Configs from before `attend` get `attend=by_block`. Of
several rounds the one with the greatest lower bound counts. Without any the winner is dropped, and look-ups answer with BSP.
Run it with the winners' Triton; it needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from carry import digest, told_by

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.hardware import Hardware
from autotax.operators import problem_from_dict
from autotax.runner.measurement import Candidate, Measurement
from autotax.spaces import space_for
from autotax.tuner.finalists import decide

HERE = str(Path(__file__).resolve().parents[1])
Winner = dict[str, Any]
ROUNDS = """
    SELECT w.samples, w.created_at, e.python, e.torch, e.triton, e.comm, e.kernels, w.conditions,
        h.device, h.count, h.links, p.fields
    FROM autotax_winner w JOIN autotax_problem p ON p.key = w.problem_key
    JOIN autotax_hardware h ON h.digest = w.hardware_digest JOIN autotax_environment e ON e.digest = w.environment_digest"""
CONFIGS = """
    SELECT DISTINCT e.kernels, t.config_digest, t.config, t.kernel_digest
    FROM autotax_trial t JOIN autotax_run r ON r.id = t.run_id
    JOIN autotax_environment e ON e.digest = r.environment_digest WHERE t.verified"""


def candidates(winner: Winner, variant: str, database: str) -> list[Winner]:
    """What the finalist rounds of a database prove best for a winner's problem without its variant, kernel digests as then."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    configs: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {}
    for sources, name, config, kernels in connection.execute(CONFIGS):
        configs.setdefault((sources, name), []).append((json.loads(config), kernels))
    names = [column[0] for column in connection.execute(ROUNDS).description]
    found = []
    for values in connection.execute(ROUNDS):
        row = dict(zip(names, values, strict=True))
        environment, hardware = winner["environment"], winner["hardware"]
        same = all(row[name] == environment[name] for name in ("torch", "triton", "comm"))
        same &= all(row[name] == hardware[name] for name in ("device", "count", "links"))
        same &= row["conditions"] == Conditions(**winner["conditions"]).key
        problem = problem_from_dict(winner["problem"])
        if not same or problem_from_dict(json.loads(row["fields"])) != problem or not row["samples"]:
            continue
        samples = json.loads(row["samples"])
        # Of the sources that the round was of: a database may have taken in winners of others.
        known = {name: configs[row["kernels"], name] for name in samples if (row["kernels"], name) in configs}
        others = {name: each for name, each in known.items() if each[0][0]["variant"] != variant}
        decided = _decided(winner, problem, {name: each[0][0] for name, each in others.items()}, samples)
        if decided:
            for _, kernels in others[decided.pop("name")]:
                told = environment | {"python": row["python"], "kernels": row["kernels"]}
                moment = row["created_at"].replace(" ", "T") + "+00:00"
                proof = {"environment": told, "kernel_digest": kernels, "tuned_at": moment, "samples": samples}
                found.append(winner | decided | proof)
    return found


def _decided(winner: Winner, problem: Any, configs: dict[str, Any], samples: dict[str, Any]) -> Winner | None:
    conditions = Conditions(**winner["conditions"])
    space = space_for(problem, Hardware(**winner["hardware"]))
    measured = {
        name: Measurement(
            Candidate(Config.of(config["variant"], config["params"]), conditions), "ok", samples=tuple(map(tuple, samples[name]))
        )
        for name, config in configs.items()
        if config["variant"] == "bsp" or _today(config) in space
    }
    decision = decide(space, list(measured.values()))
    if not decision or decision.tie or decision.winner.measurement is decision.baseline:
        return None
    best, baseline = decision.winner, decision.baseline
    assert best.measurement.latency_us and baseline.latency_us
    return {
        "name": next(name for name, measurement in measured.items() if measurement is best.measurement),
        "config": best.measurement.config.to_dict(),
        "baseline": baseline.config.to_dict(),
        "latency_us": best.measurement.latency_us,
        "baseline_us": baseline.latency_us,
        "speedup": best.speedup,
        "interval": list(best.interval),
        "tie": False,
    }


def _today(config: dict[str, Any]) -> Config:
    """A config of Flash Decode with the parameter that it may be older than."""
    return Config.of(config["variant"], {"attend": "by_block"} | config["params"])


def of_today(winner: Winner, checkouts: list[str]) -> Winner | None:
    """The winner under today's sources, if they launch the same."""
    op, variant = winner["problem"]["op"], winner["config"]["variant"]
    now = digest(HERE, op, variant)
    if winner["kernel_digest"] == now:
        return winner
    for old in checkouts:
        if digest(old, op, variant) == winner["kernel_digest"]:
            new = winner | {"config": _today(winner["config"]).to_dict(), "kernel_digest": now}
            if told_by(old, [winner]) == told_by(HERE, [new]):
                return new
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("variant")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--rounds", nargs="+", required=True)
    parser.add_argument("--checkouts", nargs="*", default=[])
    options = parser.parse_args()
    document = json.loads(options.source.read_text())
    kept = []
    for winner in document["winners"]:
        if winner["config"]["variant"] != options.variant:
            kept.append(winner)
            continue
        found = [each for database in options.rounds for each in candidates(winner, options.variant, database)]
        for each in sorted(found, key=lambda each: -each["interval"][0]):
            if proven := of_today(each, options.checkouts):
                kept.append(proven)
                told = f"{proven['config']['variant']} {proven['latency_us']:.1f} us, {proven['speedup']:.3f} x BSP"
                break
        else:
            told = "none: BSP"
        print(f"{problem_from_dict(winner['problem']).key}: {told} (was {winner['latency_us']:.1f} us)", flush=True)
    document["winners"] = kept
    options.target.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
