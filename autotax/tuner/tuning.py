"""Tuning one problem: search, finalists, verdict. Everything is stored as soon as it is known."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.db import Store
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Effort, Measurement, Overlap, Runner, TimeIsUp
from autotax.software import Environment
from autotax.spaces import Space, space_for
from autotax.tuner.finalists import (
    BASELINES,
    CHALLENGERS,
    FEWEST_JOBS,
    Decision,
    Paces,
    choose_finalists,
    run_finalists,
    summary,
)
from autotax.tuner.progress import Accounts, FailedVariant, Listener, Progress, Silence, Verdict
from autotax.tuner.run_recorder import Flight, Ledger, Study, study_name
from autotax.tuner.search import UPCOMING, Search, doubtful, opened, paired, settled, without_ladder

HOPELESS = 2.0
"""A candidate slower than the best by this factor is given up after its first samples."""
KILLED_TWICE = "being measured each time when runs were killed"
"""The error of a config that is not tried again, because runs were killed while it was being measured."""


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
    overlap: Overlap | None = None,
    began: float | None = None,
) -> Verdict:
    """Searches, proves and stores the fastest config of `problem` on `hardware`. `overlap` is called once, during the
    measurement of the finalists. The time limit counts from the monotonic time `began`, by default from the end of the first
    trial, in which ranks that have just started get warm. That trial may take as long as the limit.

    Ctrl-C ends the run early. All finished trials are stored, and the next run goes on from there. Raises UsageError for settings
    that do not fit the problem or the machine, before anything is stored; MachineError when the database or the machine fails for
    good, then only the measurement in progress is lost.
    """
    settings, space = opened(settings, problem, hardware, space)
    accounts = Accounts()
    ledger = Ledger(store, problem, hardware, environment, settings, listener or Silence())
    limit = TimeLimit(settings.timeout_s, accounts.started if began is None else began)
    run = _Run(problem, hardware, runner, ledger, settings, space, accounts, overlap, limit, began is None, settings.soak or 0)
    decision, interrupted = None, False
    try:
        decision = run.execute()
        ledger.end("done" if decision else "interrupted" if run.late else "failed", accounts.breakdown())
    except KeyboardInterrupt:
        interrupted = True
        ledger.abandon("interrupted", accounts.breakdown())
    except BaseException:
        ledger.abandon("failed", accounts.breakdown())
        raise
    ended = {"interrupted": interrupted, "late": run.late, "soak": run.soak, "failed": run.failed()}
    return _verdict(ledger, decision, run.measured, accounts, **ended)


def _verdict(
    ledger: Ledger, decision: Decision | None, measured: Sequence[Measurement], accounts: Accounts, **ended: Any
) -> Verdict:
    """How a run ended that the ledger recorded."""
    problem, hardware, environment = ledger.key
    return Verdict(
        problem=problem,
        hardware=hardware,
        environment=environment,
        winner=decision.winner if decision else None,
        baseline=decision.baseline if decision else None,
        tie=decision.tie if decision else False,
        standings=decision.standings if decision else (),
        trials=_statuses(measured),
        seconds=accounts.seconds,
        conditions=ledger.conditions,
        notices=tuple(ledger.notices),
        accounts=accounts.breakdown(),
        **ended,
    )


def _statuses(measured: Sequence[Measurement]) -> dict[str, int]:
    """The number of measurements by status."""
    return dict(Counter(measurement.status for measurement in measured))


@dataclass
class _Run:
    """One run of the tuner, from the first suggestion to the decision."""

    problem: Problem
    hardware: Hardware
    runner: Runner
    ledger: Ledger
    settings: Settings
    space: Space
    accounts: Accounts
    overlap: Overlap | None
    limit: TimeLimit
    warms: bool
    """Whether the time limit counts from the end of the first trial."""
    soak: int
    cut: bool = False
    """Whether the time limit ended the search."""
    late: bool = False
    first_s: float | None = None
    """Seconds until the first trial of this run had ended. Ranks start in it, and a problem's inputs are made."""
    measured: list[Measurement] = field(default_factory=list)

    def execute(self) -> Decision | None:
        if not self.settings.variants:
            self.space = without_ladder(self.space, self.ledger.precedents(self.space))
        if self.settings.resume:
            self.measured = self.ledger.earlier(self.space)
            self._tell_untried()
        self.search = self._open_search()
        self._explore()
        self.accounts.search_ended()
        return self._decide()

    def _tell_untried(self) -> None:
        """Reports variants without trials, for instance new ones after earlier runs have used the budget."""
        untried = sorted(set(self.space.variants) - {measurement.config.variant for measurement in self.measured})
        if untried and len(self.measured) >= self.settings.trials:
            used = f"earlier runs used all {self.settings.trials} trials"
            names = ", ".join(untried)
            self.ledger.notice(f"{used}, so the present sources of {names} were not tried: give more --trials")

    def _open_search(self) -> Search:
        _, hardware, environment = self.ledger.key
        conditions, ledger = self.ledger.conditions.searched, self.ledger
        # Optuna rejects a changed categorical distribution, so each space gets its own study.
        name = study_name(self.problem, hardware, environment, conditions, self.space.digest)
        self.study = Study(self.space, ledger, name, self.settings)
        about = {"problem": self.problem.key, "hardware": str(hardware), "conditions": conditions.key}
        about |= {"triton": environment.triton, "torch": environment.torch, "comm library": environment.comm}
        self.study.describe(about)
        self.flight = Flight(self.study.records, ledger.run_id, ledger.statuses(), self.study.call)
        measured = {measurement.config for measurement in self.measured}
        # Configs without a trial that were being measured when runs were killed.
        deadly = [config for config in self.flight.deadly if config in self.space and config not in measured]
        self.study.keep(self.measured)
        search = Search(self.space, self.settings, ledger.precedents(self.space), self.measured, deadly)
        for config in deadly:
            self._keep(Measurement(Candidate(config, conditions), "crash", KILLED_TWICE))
        return search

    def _explore(self) -> None:
        """Measures suggestions until the budget is used or the space is exhausted."""
        best = self._best(self.measured)
        self._challenge(best)
        coming: list[Config] = []
        try:
            while len(self.measured) < self.settings.trials and self._in_time() and not self._gain_is_small():
                if not coming:
                    self._look_ahead(coming)
                if not coming:
                    return
                config = coming[self.runner.expect(self.problem, coming)]
                self.flight.begin([config])
                measurement = self._try(config, best, lambda: self._look_ahead(coming))
                self._keep(measurement)
                if self.first_s is None:
                    self.first_s = self.accounts.seconds
                    self.limit = TimeLimit(self.settings.timeout_s, time.monotonic()) if self.warms else self.limit
                self.accounts.trials += measurement.verified
                self.search.tell(measurement)
                self.study.queue(measurement)
                coming.remove(config)
                leader = self._best(self.measured)
                if leader is measurement:
                    self._challenge(leader)
                best = leader
                self.ledger.listener.progress(self._progress(measurement))
        except TimeIsUp as stage:
            self.cut = True
            self.ledger.notice(f"{self.limit} stopped the trial of {config} ({stage}); it counts as no trial")
        finally:
            self.study.give_up()

    def _in_time(self) -> bool:
        """Whether the time limit leaves more than another trial and the finals are expected to take."""
        reserved = self._reserved_s()
        if self.limit.left > (reserved + self._paces().trial_s if reserved else 0.0):
            return True
        self.cut = True
        done, sought = len(self.measured), self.settings.trials
        self.ledger.notice(f"{self.limit} ended the search after {done} of {sought} trials, for the finals take their time too")
        return False

    def _reserved_s(self) -> float:
        """Seconds to keep for the finals, which need something to compare with BSP."""
        if not any(measurement.config.variant != "bsp" for measurement in self.measured):
            return 0.0
        return self.limit.reserved(self._paces().expected_s(CHALLENGERS + BASELINES, self.soak, FEWEST_JOBS))

    def _paces(self) -> Paces:
        best = self._best(self.measured)
        later = self.accounts.trials - 1
        trial_s = (self.accounts.seconds - (self.first_s or 0.0)) / later if later > 0 else self.accounts.seconds
        return Paces(trial_s, (best.latency_us or 0.0) / 1e6 if best else 0.0, self.hardware.on_gpu)

    def _gain_is_small(self) -> bool:
        """Whether the search ends early because the expected gain of more trials is too small."""
        gain, least = self.accounts.gain, self.settings.ends_below
        if gain is None or least is None or gain >= least:
            return False
        self.ledger.notice(
            f"the search ended after {len(self.measured)} trials: eight more should win {gain:.2%}, less than {least:.1%}"
        )
        return True

    def _look_ahead(self, coming: list[Config]) -> None:
        """Adds new suggestions, up to the runner's foresight and the rest of the budget, and writes the waiting records of the
        study. This runs while the ranks start or measure. All suggestions are compiled ahead; idle compilers then begin with
        configs that are likely to be suggested later.
        """
        ahead = self.runner.foresight if coming or self.measured else 1  # the model is built while the first config is measured
        count = min(ahead, self.settings.trials - len(self.measured)) - len(coming)
        suggestions = [self.search.ask() for _ in range(count)]
        coming += [config for config in suggestions if config is not None]
        if coming:
            left = max(0, self.settings.trials - len(self.measured) - len(coming))
            self.runner.expect(self.problem, coming, self.search.upcoming(min(UPCOMING, left)))
        self.study.save()
        self.accounts.gain = self.search.gain

    def _try(self, config: Config, best: Measurement | None, overlap: Overlap) -> Measurement:
        """Measures one config of the search, and measures it again if the figure is suspiciously fast."""
        limit = None
        if self.hardware.on_gpu and config.variant != "bsp" and best and best.latency_us:
            limit = HOPELESS * best.latency_us
        measurement = self._measure_paired(best, config, self._effort(limit), overlap)
        if not doubtful(measurement, self.measured):
            return measurement
        again = self._measure_paired(best, config, self._effort(limit))
        measurement, notice = settled(measurement, again)
        if notice:
            self.ledger.notice(notice)
        return measurement

    def _effort(self, give_up_us: float | None) -> Effort:
        """The effort of a trial, which the time limit stops."""
        return Effort(give_up_us=give_up_us, within_s=None if self.settings.timeout_s is None else self.limit.left)

    def _measure_paired(
        self, best: Measurement | None, config: Config, effort: Effort, overlap: Overlap | None = None
    ) -> Measurement:
        """Measures one config, in one job with the incumbent if trials are paired."""
        candidate = Candidate(config, self.ledger.conditions.searched)
        if not (self.settings.paired and best):
            return self._measure([candidate], effort, overlap)[0]
        again, measured = self._measure([best.candidate, candidate], effort, overlap)
        return paired(best, again, measured)

    def _measure(self, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None) -> list[Measurement]:
        """Runs one job of the runner, and records its time and its notices."""
        overlap_s = 0.0

        def timed() -> None:
            nonlocal overlap_s
            began = time.monotonic()
            if overlap:
                overlap()
            overlap_s += time.monotonic() - began

        started = time.monotonic()
        measured = self.runner.measure(self.problem, candidates, effort, timed)
        self.accounts.note(measured, time.monotonic() - started, overlap_s)
        for measurement in measured:
            for notice in measurement.notices:
                self.ledger.notice(notice)
        return measured

    def _keep(self, measurement: Measurement) -> None:
        self.ledger.add(len(self.measured), measurement)
        self.measured.append(measurement)

    def _challenge(self, leader: Measurement | None) -> None:
        """Suggests BSP with the parameters of a new leader, so that the baseline is tuned as well as the leader."""
        if leader and leader.config.variant != "bsp":
            default = self.space.default("bsp").values
            self.search.suggest_next(Config.of("bsp", {name: leader.config.values.get(name, default[name]) for name in default}))

    def _decide(self) -> Decision | None:
        """Runs the finals. Returns None if nothing could be verified, and if the time limit came first."""
        variants = {measurement.config.variant for measurement in self.measured}
        if self.cut and not variants - {"bsp"}:
            self._end_late("before anything but BSP was measured")
            return None
        try:
            return self._run_finals()
        except TimeIsUp as stage:
            self._end_late(f"in the finals ({stage})")
            return None

    def _end_late(self, where: str) -> None:
        self.late = True
        self.flight.begin([])
        again = "run the same command again to go on, or give it more time"
        self.ledger.notice(f"{self.limit} came {where}, so nothing is decided: {again}")

    def _run_finals(self) -> Decision | None:
        challengers, baselines = CHALLENGERS, BASELINES
        if (last := self.limit.last) is not None:
            challengers, baselines, soak = self._paces().fitting(last, self.soak)
            if soak < self.soak:
                self.ledger.notice(f"{self.limit} leaves time for a soak of {soak} in place of {self.soak} replays")
            self.soak = soak
        finalists, reserves = choose_finalists(
            self.measured, self._unfit(), self.ledger.conditions, challengers, baselines,
            registry.of(self.problem).peers,
        )  # fmt: skip
        if not any(candidate.config.variant == "bsp" for candidate in finalists) and "bsp" in self.space.variants:
            # The round cannot do without this config, and something else may have ended its trial.
            finalists.append(Candidate(self.space.default("bsp"), self.ledger.conditions))
        champions = [champion for champion in self.ledger.champions(self.space) if champion.config not in self.flight.deadly]
        candidates = list(dict.fromkeys([*finalists, *champions]))
        suspects = [candidate for candidate in candidates if self.flight.deaths[candidate.config]]
        if suspects:
            self.ledger.notice(f"{len(suspects)} finalists are soaked one by one, for they were in flight when a run was killed")
        self.ledger.listener.progress(self._progress(None, phase="finalists"))
        ids: dict[Candidate, int] = {}

        def measure(together: Sequence[Candidate], effort: Effort) -> list[Measurement]:
            self.flight.begin([candidate.config for candidate in together])
            overlap, self.overlap = self.overlap, None
            measured = self._measure(together, replace(effort, within_s=self.limit.last), overlap)
            for wrong in (m for m in measured if m.status == "wrong_result"):  # stored at once, even if the round fails
                ids.update(self.ledger.add_finalists(len(self.measured), [wrong]))
                self.ledger.withdraw(wrong)
            return measured

        decision, measured = run_finalists(self.space, measure, candidates, reserves, self.soak, suspects)
        self.flight.begin([])
        ids |= self.ledger.add_finalists(len(self.measured), [m for m in measured if m.candidate not in ids])
        if decision:
            self.ledger.crown(decision, measured, ids)
            self.study.describe({"verdict": summary(decision)})
            if not self.soak:
                self.ledger.notice("the winner is not soaked: a race that shows once in a thousand calls may have gone unseen")
        return decision

    def _unfit(self) -> set[Config]:
        """Configs that failed as finalists before; those that were in flight when runs were killed are first stored as such."""
        failed = self.ledger.failed_finalists()
        failures = failed | {m.config for m in self.measured if m.status != "ok"}
        for config in (config for config in self.flight.deadly if config not in failures):
            self.ledger.notice(f"{config} is not among the finalists: {KILLED_TWICE}")
            fate = Measurement(Candidate(config, self.ledger.conditions), "crash", KILLED_TWICE)
            self.ledger.add_finalists(len(self.measured), [fate])
        return failed.union(self.flight.deadly)

    def _progress(self, last: Measurement | None, phase: str = "searching") -> Progress:
        baseline = self._best([m for m in self.measured if m.config.variant == "bsp"])
        return Progress(
            problem=self.problem,
            done=len(self.measured),
            total=self.settings.trials,
            statuses=_statuses(self.measured),
            last=last,
            best=self._best(self.measured),
            baseline_us=baseline.latency_us if baseline else None,
            seconds=self.accounts.seconds,
            seconds_left=None if self.settings.timeout_s is None else max(0.0, self.limit.left - self._reserved_s()),
            limit_s=None if self.settings.timeout_s is None else self.limit.left,
            phase=phase,
            gain=self.accounts.gain,
        )

    def failed(self) -> tuple[FailedVariant, ...]:
        """The variants of which no trial was right, with their first failure."""
        by_variant: dict[str, list[Measurement]] = {}
        for measurement in self.measured:
            by_variant.setdefault(measurement.config.variant, []).append(measurement)
        return tuple(
            FailedVariant(variant, len(measurements), measurements[0].status, measurements[0].error or "")
            for variant, measurements in by_variant.items()
            if not any(measurement.verified for measurement in measurements)
        )

    @staticmethod
    def _best(measured: Iterable[Measurement]) -> Measurement | None:
        verified = [m for m in measured if m.status == "ok" and m.latency_us is not None]
        return min(verified, key=lambda m: m.score_us or 0.0, default=None)


GRACE_S, GRACE_SHARE = 10.0, 0.2
"""A run ends within its limit and the larger of GRACE_S and this share of the limit."""
CLOSING_S = 3.0
"""The part of the grace in which ranks end and the verdict is stored and printed."""
MOST_FOR_FINALS = 0.5
"""The largest share of the limit that is kept for the finals."""


@dataclass(frozen=True)
class TimeLimit:
    """`seconds` from the monotonic time `began`; None: no limit."""

    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the limit, 0 after it; infinite without one."""
        return math.inf if self.seconds is None else max(0.0, self.began + self.seconds - time.monotonic())

    @property
    def last(self) -> float | None:
        """Seconds that the last job of the ranks may take, the grace included; None without a limit."""
        if self.seconds is None:
            return None
        grace = max(GRACE_S, GRACE_SHARE * self.seconds) - CLOSING_S
        return max(0.0, self.began + self.seconds + grace - time.monotonic())

    def reserved(self, finals_s: float) -> float:
        """Seconds to keep for finals that are expected to take `finals_s`."""
        return 0.0 if self.seconds is None else min(finals_s, MOST_FOR_FINALS * self.seconds)

    def __str__(self) -> str:
        return f"the time limit of {self.seconds:g} s"


# Proofs of known configs without a search: they are verified, soaked, and measured interleaved with bulk-synchronous (BSP).

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
        candidates = [Candidate(config, settings.conditions) for config in contenders if config in space]
        accounts.search_ended()
        decision, measured = run_finalists(
            space, measure, list(dict.fromkeys([*candidates, *ledger.champions(space)])), soak=settings.soak
        )
        ids = ledger.add_finalists(0, measured)
        if decision:
            ledger.crown(decision, measured, ids)
        ledger.end("done" if decision else "failed", accounts.breakdown())
    except TimeIsUp as stage:
        late = True
        ledger.notice(f"{limit} came in the finals ({stage}), so nothing is decided")
        ledger.end("failed", accounts.breakdown())
    except KeyboardInterrupt:
        interrupted = True
        ledger.abandon("interrupted", accounts.breakdown())
    except BaseException:
        ledger.abandon("failed", accounts.breakdown())
        raise
    return _verdict(ledger, decision, measured, accounts, interrupted=interrupted, late=late, soak=settings.soak)
