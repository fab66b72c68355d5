"""Tuning one problem: search, finalists, verdict. Everything is stored as soon as it is known."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import Store, TrialRecord, WinnerRecord
from autotax.hardware import Environment, Hardware
from autotax.problem import Problem
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner
from autotax.runner.replay import measurement_of
from autotax.spaces import Space, space_for
from autotax.spaces.schedule import check
from autotax.tuner.finalists import Decision, choose_finalists, run_finalists
from autotax.tuner.progress import Listener, Progress, Settings, Silence, Verdict
from autotax.tuner.search import Search, Suggestion

HOPELESS = 2.0
"""A candidate slower than the best by this factor is given up after its first samples."""
FINALISTS = {"stage": "finalists"}


def tune(
    problem: Problem,
    *,
    hardware: Hardware,
    runner: Runner,
    store: Store,
    environment: Environment,
    settings: Settings,
    listener: Listener | None = None,
    space: Space | None = None,
) -> Verdict:
    """Searches, proves and stores the fastest config of `problem` on `hardware`.

    Ctrl-C ends the run early: what was measured is stored, and the next run goes on from there. Raises UsageError for
    settings that do not fit the problem, before anything is stored.
    """
    space = space or space_for(problem, hardware)
    if settings.variants:
        space = space.only(("bsp", *settings.variants) if "bsp" in space.variants else settings.variants)
    run = _Run(problem, hardware, runner, store, environment, settings, listener or Silence(), space)
    return run.execute()


class _Run:
    """One run of the tuner, from the first suggestion to the verdict."""

    def __init__(
        self, problem: Problem, hardware: Hardware, runner: Runner, store: Store, environment: Environment,
        settings: Settings, listener: Listener, space: Space,
    ) -> None:  # fmt: skip
        self.problem = problem
        self.hardware = hardware
        self.runner = runner
        self.store = store
        self.environment = environment
        self.settings = settings
        self.listener = listener
        self.space = space
        self.started = time.monotonic()
        self.measured: list[Measurement] = []
        self.run_id = store.begin_run(problem, hardware, environment, settings.to_dict())
        if settings.resume:
            self.measured = [measurement_of(record) for record in self._earlier()]
        # A study never forgives another choice of values: each space has one of its own.
        name = f"{problem.key} on {hardware.digest} with {environment.digest} in {space.digest}"
        self.search = Search(space, store.url, name, settings, {m.config.digest for m in self.measured})

    def execute(self) -> Verdict:
        status, decision, interrupted = "failed", None, False
        try:
            self._explore()
            decision = self._decide()
            status = "done" if decision else "failed"
        except KeyboardInterrupt:
            status, interrupted = "interrupted", True
        finally:
            self.store.end_run(self.run_id, status)
        return Verdict(
            problem=self.problem,
            hardware=self.hardware,
            environment=self.environment,
            winner=decision.winner if decision else None,
            baseline=decision.baseline if decision else None,
            tie=decision.tie if decision else False,
            standings=decision.standings if decision else (),
            trials=self._statuses(),
            seconds=time.monotonic() - self.started,
            interrupted=interrupted,
        )

    def _explore(self) -> None:
        """Measures suggestions until the budget is used or the space is exhausted."""
        best = self._best(self.measured)
        self._challenge(best)
        coming: list[Suggestion] = []
        try:
            while len(self.measured) < self.settings.trials and self._seconds_left() != 0.0:
                coming += self._suggestions(len(coming))
                if not coming:
                    return
                trial, config = coming[self.runner.expect(self.problem, [config for _, config in coming])]
                measurement = self._measure(config, best)
                coming.remove((trial, config))
                self._store(measurement, {})
                self.search.tell(trial, measurement)
                self.measured.append(measurement)
                leader = self._best(self.measured)
                if leader is measurement:
                    self._challenge(leader)
                best = leader
                self.listener.progress(self._progress(measurement))
        finally:
            for trial, _ in coming:
                self.search.give_up(trial)

    def _suggestions(self, waiting: int) -> list[Suggestion]:
        """As many new suggestions as the runner likes to know in advance, and the budget still allows."""
        wanted = min(self.runner.foresight, self.settings.trials - len(self.measured)) - waiting
        asked = (self.search.ask() for _ in range(wanted))
        return [suggestion for suggestion in asked if suggestion is not None]

    def _measure(self, config: Config, best: Measurement | None) -> Measurement:
        candidate = Candidate(config, self._conditions)
        if reason := check(self.problem, config):
            return Measurement(candidate, "infeasible", reason)
        limit = None
        if self.hardware.on_gpu and config.variant != "bsp" and best and best.latency_us:
            limit = HOPELESS * best.latency_us
        return self.runner.measure(self.problem, [candidate], Effort(give_up_us=limit))[0]

    def _challenge(self, leader: Measurement | None) -> None:
        """Suggests BSP with the parameters of a new leader, so that the baseline is tuned as well as what beats it."""
        if leader and leader.config.variant != "bsp":
            default = self.space.default("bsp").values
            self.search.suggest_next(Config.of("bsp", {name: leader.config.values.get(name, default[name]) for name in default}))

    def _decide(self) -> Decision | None:
        candidates = list(dict.fromkeys([*choose_finalists(self.measured), *self._champion()]))
        self.listener.progress(self._progress(None, phase="finalists"))
        decision, measurements = run_finalists(self.problem, self.space, self.runner, candidates)
        ids = {m.candidate: self._store(m, FINALISTS) for m in measurements}
        if decision:
            winner, baseline = decision.winner.measurement, decision.baseline
            assert winner.latency_us is not None and baseline.latency_us is not None
            self.store.set_winner(
                WinnerRecord(
                    problem=self.problem,
                    hardware=self.hardware,
                    environment=self.environment,
                    trial_id=ids[winner.candidate],
                    config=winner.config,
                    latency_us=winner.latency_us,
                    baseline_us=baseline.latency_us,
                    baseline=baseline.config,
                    speedup=decision.winner.speedup,
                    interval_low=decision.winner.interval[0],
                    interval_high=decision.winner.interval[1],
                    tie=decision.tie,
                    verified=winner.verified,
                    samples={m.config.digest: [list(samples) for samples in m.samples] for m in measurements},
                )
            )
        return decision

    def _champion(self) -> list[Candidate]:
        """The stored winner of this very problem here: it stands until somebody beats it, however short this run was."""
        return [
            Candidate(winner.config, self._conditions)
            for winner in self.store.winners(with_samples=False)
            if (winner.problem, winner.hardware, winner.environment) == (self.problem, self.hardware, self.environment)
        ]

    @property
    def _conditions(self) -> Conditions:
        return Conditions.usual(self.hardware.on_gpu)

    def _store(self, measurement: Measurement, more: dict[str, str]) -> int:
        return self.store.add_trial(
            self.run_id,
            TrialRecord(
                number=len(self.measured),
                config=measurement.config,
                status=measurement.status,
                latency_us=measurement.latency_us,
                samples=[list(samples) for samples in measurement.samples] or None,
                slowest_rank=measurement.slowest_rank,
                compile_s=measurement.compile_s,
                verified=measurement.verified,
                relative_error=measurement.relative_error,
                error=measurement.error,
                conditions=measurement.conditions | more,
            ),
        )

    def _earlier(self) -> Iterable[TrialRecord]:
        """The searched trials of earlier runs on this machine with this software, since the last that began anew; the
        latest of each config.
        """
        earlier = self.store.trials(self.problem, self.hardware, environment=self.environment)
        anew = max((r.run.id for r in earlier if r.run and r.run.settings.get("resume") is False), default=0)
        searched = [r for r in earlier if r.conditions.get("stage") != FINALISTS["stage"] and (r.run_id or 0) >= anew]
        return {record.config.digest: record for record in searched if record.config in self.space}.values()

    def _progress(self, last: Measurement | None, phase: str = "searching") -> Progress:
        baseline = self._best([m for m in self.measured if m.config.variant == "bsp"])
        return Progress(
            problem=self.problem,
            done=len(self.measured),
            wanted=self.settings.trials,
            statuses=self._statuses(),
            last=last,
            best=self._best(self.measured),
            baseline_us=baseline.latency_us if baseline else None,
            seconds=time.monotonic() - self.started,
            seconds_left=self._seconds_left(),
            phase=phase,
        )

    def _statuses(self) -> dict[str, int]:
        return dict(Counter(measurement.status for measurement in self.measured))

    def _seconds_left(self) -> float | None:
        if self.settings.timeout_s is None:
            return None
        return max(0.0, self.settings.timeout_s - (time.monotonic() - self.started))

    @staticmethod
    def _best(measured: Iterable[Measurement]) -> Measurement | None:
        verified = [m for m in measured if m.status == "ok" and m.latency_us is not None]
        return min(verified, key=lambda m: m.latency_us or 0.0, default=None)
