"""Example records of a store: runs, trials and winners of one problem on one machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store, TrialRecord, WinnerRecord
from autotax.hardware import Hardware
from autotax.operators import operators, with_world_size
from autotax.operators.registry import variant_digest
from autotax.software import Environment

HARDWARE = Hardware(
    backend="cuda",
    device="NVIDIA H200",
    target="cuda:90",
    count=4,
    memory_gib=139,
    processors=132,
    shared_memory=232448,
    l2_bytes=60 * 2**20,
    links="peer access 12/12 pairs",
)
ENVIRONMENT = Environment(python="3.11.7", torch="2.9.0", triton="3.6.0", comm="nccl 2.27.5", kernels="0123456789abcdef")


@dataclass(frozen=True)
class Examples:
    """A problem, and three configs of it, of which no two are equal."""

    problem: Problem
    baseline: Config
    config: Config
    another: Config

    @classmethod
    def of_any_operator(cls) -> Examples:
        """Examples of the first operator that has a varying size and three variants."""
        fit = (one for one in operators().values() if one.examples and one.problem.varying() and len(one.variants) > 2)
        operator = next(fit)
        others = [name for name in operator.variants if name != operator.baseline]
        return cls(
            with_world_size(operator.examples[True], HARDWARE.count),
            Config.of(operator.baseline, block_m=128),
            Config.of(others[0], block_m=64, comm_ctas=16, order="zigzag"),
            Config.of(others[1]),
        )

    @property
    def other_problem(self) -> Problem:
        """The same with another size."""
        name = next(iter(self.problem.varying()))
        size: dict[str, Any] = {name: getattr(self.problem, name) // 2}
        return replace(self.problem, **size)

    def trial(self, number: int = 0, config: Config | None = None, **more: Any) -> TrialRecord:
        """A verified trial; `more` overrides fields."""
        good: dict[str, Any] = {
            "status": "ok",
            "latency_us": 120.5,
            "samples": [[120.0, 120.5], [119.25, 1 / 3]],
            "slowest_rank": 1,
            "compile_s": 2.5,
            "verified": True,
            "relative_error": 1e-3,
            "conditions": {"mode": "graph", "l2": "cold", "skew_us": 0.0},
        }
        return TrialRecord(number=number, config=config or self.config, **(good | more))

    def winner(self, trial_id: int, config: Config | None = None, problem: Problem | None = None, **more: Any) -> WinnerRecord:
        """A verified winner that the trial proves; `more` overrides fields."""
        config, problem = config or self.config, problem or self.problem
        good: dict[str, Any] = {
            "hardware": HARDWARE,
            "environment": ENVIRONMENT,
            "latency_us": 120.5,
            "baseline_us": 150.0,
            "baseline": self.baseline,
            "speedup": 1.245,
            "interval_low": 1.2,
            "interval_high": 1.29,
            "tie": False,
            "verified": True,
            "samples": {config.digest: [[120.0], [121.0]], self.baseline.digest: [[150.0], [149.0]]},
            "kernel_digest": variant_digest(problem.op, config.variant),
        }
        return WinnerRecord(problem=problem, trial_id=trial_id, config=config, **(good | more))

    def begin(self, store: Store, problem: Problem | None = None) -> int:
        """Begins a run of the problem and returns its id."""
        return store.begin_run(problem or self.problem, HARDWARE, ENVIRONMENT, {})

    def keep(
        self,
        store: Store,
        problem: Problem | None = None,
        config: Config | None = None,
        hardware: Hardware = HARDWARE,
        environment: Environment = ENVIRONMENT,
        conditions: Conditions = Conditions(),  # noqa: B008
        **more: Any,
    ) -> WinnerRecord:
        """Stores a winner with the run and the trial that it needs."""
        run_id = store.begin_run(problem or self.problem, hardware, environment, {})
        sources = more.get("kernel_digest")
        trial = self.trial(config=config, conditions=conditions.to_dict(), kernel_digest=sources)
        more |= {"hardware": hardware, "environment": environment, "conditions": conditions}
        winner = self.winner(store.add_trial(run_id, trial), config, problem, **more)
        store.set_winner(winner)
        return winner
