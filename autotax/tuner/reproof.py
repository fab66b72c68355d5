"""Proves known configs again without a search: they are verified, soaked, and measured interleaved with bulk-synchronous (BSP).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.db import Store
from autotax.hardware import Hardware
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner, TimeIsUp
from autotax.software import Environment
from autotax.spaces import space_for
from autotax.tuner.finalists import run_finalists
from autotax.tuner.progress import Accounts, Listener, Silence, Verdict
from autotax.tuner.run_recorder import Ledger
from autotax.tuner.tuning import TimeLimit


def prove(
    problem: Problem,
    configs: Sequence[Config],
    *,
    hardware: Hardware,
    runner: Runner,
    store: Store,
    environment: Environment,
    settings: Settings,
    listener: Listener | None = None,
    limit: TimeLimit | None = None,
) -> Verdict:
    """The verdict of a finalist round of `configs`, BSP and the stored winner. Everything is stored as `tune` stores it.

    Configs that the space does not admit are left out with a notice. Ctrl-C and the end of `limit` end the run without a
    decision. Raises UsageError and MachineError as `tune` does.
    """
    space = space_for(problem, hardware)
    settings = replace(settings, proof=True).on(hardware)
    assert settings.conditions is not None and settings.soak is not None
    conditions = settings.conditions
    accounts = Accounts()
    ledger = Ledger(store, problem, hardware, environment, settings, listener or Silence())

    def measure(together: Sequence[Candidate], effort: Effort) -> list[Measurement]:
        started = time.monotonic()
        measured = runner.measure(problem, together, replace(effort, within_s=limit.last if limit else None))
        accounts.note(measured, time.monotonic() - started)
        for notice in (notice for measurement in measured for notice in measurement.notices):
            ledger.notice(notice)
        for wrong in (measurement for measurement in measured if measurement.status == "wrong_result"):
            ledger.withdraw(wrong)
        return measured

    decision, interrupted, late = None, False, False
    measured: list[Measurement] = []
    try:
        for config in configs:
            if why := space.why_not(config):
                ledger.notice(f"{config} does not fit any more: {why}")
        contenders = [space.default("bsp"), *configs]
        candidates = [Candidate(config, conditions) for config in contenders if config in space]
        accounts.search_ended()
        decision, measured = run_finalists(
            space, measure, list(dict.fromkeys([*candidates, *ledger.champions()])), soak=settings.soak
        )
        ids = ledger.add_finalists(0, measured)
        if decision:
            ledger.crown(decision, measured, ids)
        ledger.end("done" if decision else "failed", accounts.told())
    except TimeIsUp as stage:
        late = True
        ledger.notice(f"{limit} came in the finals ({stage}), so nothing is decided")
        ledger.end("failed", accounts.told())
    except KeyboardInterrupt:
        interrupted = True
        ledger.abandon("interrupted", accounts.told())
    except BaseException:
        ledger.abandon("failed", accounts.told())
        raise
    return Verdict(
        problem=problem,
        hardware=hardware,
        environment=environment,
        winner=decision.winner if decision else None,
        baseline=decision.baseline if decision else None,
        tie=decision.tie if decision else False,
        standings=decision.standings if decision else (),
        trials=dict(Counter(measurement.status for measurement in measured)),
        seconds=accounts.seconds,
        interrupted=interrupted,
        late=late,
        conditions=conditions,
        soak=settings.soak,
        notices=tuple(ledger.notices),
        accounts=accounts.told(),
    )
