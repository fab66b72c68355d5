"""The Python interface: the commands as calls that return typed results.

    verdict = autotax.tune(autotax.AllGatherGemm(m=512, n=7168, k=8192, world_size=4), trials=36)
    comparison = autotax.compare(verdict.problem)

Each call starts its ranks as separate processes and ends them when it returns. No call is collective. Calls raise UsageError for
bad input before anything is started, and MachineError if the machine or the database fails for good.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotax import hardware as machine
from autotax import runner as runners
from autotax import tuner
from autotax.core.conditions import Conditions
from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.settings import TRIAL_STATUSES, as_deployed
from autotax.db import Store, TrialRecord, shipped
from autotax.db.lookup import lookup, reload
from autotax.db.records import Place, Stale, stale_winners
from autotax.hardware import Hardware, check_problems, require_problem
from autotax.operators import registry
from autotax.software import environment
from autotax.spaces import space_for
from autotax.tuner import Comparison, Listener, Progress, Settings, Verdict, equal_code
from autotax.tuner.comparison import Choice, baseline_for, best_of, shown_variants, trials_here
from autotax.tuner.progress import Refreshed, frame
from autotax.tuner.tuning import TimeLimit

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.kernels.context import Context
    from autotax.operators.inputs import Call, Draw

Job = tuple[Problem, Settings]
Watch = Callable[[Problem, Hardware], AbstractContextManager[Listener]]
"""Makes the listener of a problem's run."""


def tune(
    problem: Problem, *, trials: int | None = None, effort: str | None = None, timeout_s: float | None = None,
    variants: Sequence[str] | None = None, conditions: Conditions | None = None, sampler: str | None = None, seed: int = 0,
    paired: bool = False, soak: int | None = None, resume: bool = True, db: str | Path | None = None, backend: str | None = None,
    on_progress: Callable[[Progress], None] | None = None, on_notice: Callable[[str], None] | None = None, progress: bool = False,
) -> Verdict:  # fmt: skip
    """Finds, proves and stores the fastest config of a problem: `autotax tune`.

    Args:
        problem: The problem to tune.
        trials: The most trials. None: as many as `effort` says.
        effort: `quick` (24 trials), `normal` (60) or `full` (300). The first two may end early with the sampler `gp`, when little
            gain is expected. None: `normal` without `trials`, else all of `trials`.
        timeout_s: Seconds for the call, the start of the ranks included. None: no limit.
        variants: Names of the variants to search. None: all.
        conditions: How calls are measured. None: as usual on the machine.
        sampler: `tpe`, `random` or `gp`. None: `gp` where a prior was trained, else `tpe`.
        seed: Of the sampler and of the ranks.
        paired: Measure each trial in one job with the incumbent.
        soak: Replays of a finalist with delayed ranks. None: 2000 on GPUs, 20 on CPU ranks.
        resume: Go on from the stored trials of the problem.
        db: A path or a URL. None: the default database.
        backend: `cuda`, `rocm` or `cpu`. None: that of this machine.
        on_progress: Called after each trial.
        on_notice: Called with each notice, a line.
        progress: Print progress and notices as the command does.

    Returns:
        The verdict. Its winner is None if nothing could be verified, or if the run was interrupted or out of time.

    Raises:
        UsageError: Bad input, before anything is started.
        MachineError: The machine or the database failed.
    """
    hardware = machine.detect(backend)
    check_problems([problem], hardware)
    if isinstance(variants, str):
        raise UsageError(f"variants is {variants!r}; it must be a list of names: give [{variants!r}]")
    settings = Settings.of_effort(
        effort, trials=trials, timeout_s=timeout_s, variants=tuple(variants) if variants else None, sampler=sampler, seed=seed,
        paired=paired, soak=soak, resume=resume, conditions=as_deployed(conditions, hardware),
    )  # fmt: skip
    if settings.variants:
        space_for(problem, hardware).only(settings.variants)
    listener = _Calls(on_progress or _ignore, on_notice or _ignore)

    @contextmanager
    def watch(problem: Problem, hardware: Hardware) -> Iterator[Listener]:
        if not progress:
            yield listener
            return
        from autotax.report.progress_display import TuningScreen

        with TuningScreen(1, soak=soak)(problem, hardware) as screen:
            yield _Both(screen, listener)

    with Store.open(db, create=True) as store:
        (verdict,) = tune_jobs([(problem, settings)], hardware, store, watch)
    return verdict


def tune_jobs(
    jobs: Sequence[Job], hardware: Hardware, store: Store, watch: Watch,
    then: Callable[[Verdict, runners.LiveRunner], None] | None = None,
) -> Iterator[Verdict]:  # fmt: skip
    """Yields the verdict of each job. All problems of a world size share one pool of ranks. Ends early when interrupted.

    `then` is called before the ranks end. Later look-ups of this process see the winner.
    """
    for world_size in dict.fromkeys(problem.world_size for problem, _ in jobs):
        alike = [job for job in jobs if job[0].world_size == world_size]
        with ranks(hardware, world_size, jobs[0][1].seed) as runner:
            compile_first = partial(_begin, alike[0], hardware, runner, store)
            for (problem, settings), later in zip_longest(alike, alike[1:]):
                # The limit of a single problem bounds the whole call, the start of the ranks included. Several problems share the
                # ranks, whose start takes no time of the first one.
                began = time.monotonic() if len(alike) == 1 else None
                with watch(problem, hardware) as listener:
                    software = runner.start(compile_first)
                    begin = partial(_begin, later, hardware, runner, store) if later else None
                    verdict = tuner.tune(
                        problem, hardware=hardware, runner=runner, store=store, environment=software,
                        settings=settings, listener=listener, overlap=begin, began=began,
                    )  # fmt: skip
                if verdict.winner:
                    store.forget_miss(problem, hardware, verdict.conditions)
                    reload()
                if then:
                    then(verdict, runner)
                yield verdict
                if verdict.interrupted:
                    return


def _begin(job: Job, hardware: Hardware, runner: runners.LiveRunner, store: Store) -> None:
    """Lets compilers begin with the next problem. Best effort: errors come up again when that problem is tuned."""
    with suppress(Exception):
        tuner.compile_ahead(job[0], hardware, runner, store, environment(hardware.backend), job[1])


def refresh(
    problems: Problem | Sequence[Problem] | None = None, *, everything: bool = False, conditions: Conditions | None = None,
    soak: int | None = None, timeout_s: float | None = None, db: str | Path | None = None, backend: str | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> list[Refreshed]:  # fmt: skip
    """Proves stale winners again after a change of software: `autotax refresh`. A few seconds for each problem.

    Candidates are your winners, the shipped ones that were measured on devices like these, and what others wrote that can be
    served. Each is verified, soaked and measured interleaved with BSP; the new winner is stored.

    Args:
        problems: One problem or several. None: all that have a stale winner.
        everything: Prove winners that still hold, too.
        conditions: Only winners for these. None: for any.
        soak: As in `tune`.
        timeout_s: Seconds for all problems together, the start of the ranks included. None: no limit.
        db: As in `tune`.
        backend: As in `tune`.
        on_notice: Called with each notice, a line.

    Returns:
        A result for each problem that was measured. A stale winner whose kernels compile to the machine code that was proven
        holds without a measurement and has no result.

    Raises:
        UsageError: Bad input, before anything is started.
        MachineError: The machine or the database failed.
    """
    hardware = machine.detect(backend)
    requested = [problems] if isinstance(problems, Problem) else problems
    listener = _Calls(_ignore, on_notice or _ignore)
    with Store.open(db, create=True) as store:
        limit = TimeLimit(timeout_s)
        stale = stale_here(store, hardware, requested, conditions, everything=everything)
        unequal = stale if everything else hold_equal(stale, hardware, store, limit, listener.notice)
        return list(refresh_on(unequal, hardware, store, lambda *_: nullcontext(listener), soak=soak, limit=limit))


def stale_here(
    store: Store, hardware: Hardware, problems: Sequence[Problem] | None, conditions: Conditions | None, *, everything: bool
) -> list[Stale]:
    """The problems that can be refreshed here, from this store and the shipped winners, fewest ranks first. Raises UsageError
    for problems that do not fit the machine.
    """
    here = Place(hardware, environment(hardware.backend), as_deployed(conditions, hardware))
    winners = [*store.winners(with_samples=False), *shipped.winners()]
    if problems is not None:
        check_problems(problems, hardware)
    outdated = stale_winners(winners, here, problems=problems, any_conditions=conditions is None, everything=everything)
    return sorted(map(partial(_completed, hardware), outdated), key=lambda stale: stale.problem.world_size)


def _completed(hardware: Hardware, stale: Stale) -> Stale:
    """The former winners of a problem with the parameters that they are older than."""
    space = space_for(stale.problem, hardware)
    return replace(stale, winners=tuple(replace(winner, config=space.completed(winner.config)) for winner in stale.winners))


def hold_equal(
    stale: Sequence[Stale], hardware: Hardware, store: Store, limit: TimeLimit, notice: Callable[[str], object]
) -> list[Stale]:
    """Stores winners that hold because their kernels compile to the machine code that was proven. Returns what has to be proven.
    """
    left = equal_code.hold(stale, hardware, store, limit.left)
    reload()
    if held := len(stale) - len(left):
        notice(f"{held} of {len(stale)} stale winners hold: their kernels compile to equal machine code here")
    return left


def refresh_on(
    stale: Sequence[Stale], hardware: Hardware, store: Store, watch: Watch, *, soak: int | None = None, limit: TimeLimit,
    each_s: float | None = None,
) -> Iterator[Refreshed]:  # fmt: skip
    """Yields each problem when it is proven. All problems of a world size share one pool of ranks. Ends early when interrupted or
    at the limit. With `each_s` only the best former winner of a problem is proven, for about so many seconds. Without it, what
    others wrote and can be served is measured beside all of them.
    """
    for world_size, group in groupby(stale, key=lambda item: item.problem.world_size):
        several = list(group)
        with ranks(hardware, world_size) as runner:
            for number, item in enumerate(several):
                if not limit.left:
                    return
                for coming in several[number + (number > 0) : number + 2]:  # compiles its kernels ahead
                    runner.expect(coming.problem, coming.configs)
                most = None if each_s is None else 1
                others = [] if most else registry.of(item.problem).alternatives(item.problem, hardware)
                configs = tuple(dict.fromkeys((*item.baselines[:most], *item.configs[:most], *others)))
                with watch(item.problem, hardware) as listener:
                    verdict = tuner.prove(
                        item.problem, configs, hardware=hardware, runner=runner, store=store, environment=runner.environment,
                        settings=Settings(trials=len(configs), soak=soak, conditions=item.conditions), listener=listener,
                        limit=limit if each_s is None or limit.left <= each_s else TimeLimit(each_s),
                    )  # fmt: skip
                reload()
                yield Refreshed(item, verdict)
                if verdict.interrupted:
                    return


class Trials(list[TrialRecord]):
    """Trials of the database, in the order in which they were stored."""

    def __repr__(self) -> str:
        statuses = ", ".join(f"{count} {status}" for status, count in Counter(trial.status for trial in self).items())
        return f"<Trials: {len(self)} ({statuses or 'none'})>"

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` with a row for each trial. Raises UsageError without pandas."""
        return frame(
            {
                "problem": trial.run.problem.key if trial.run else None, "stage": trial.conditions.get("stage", "search"),
                "number": trial.number, "variant": trial.config.variant, **trial.config.values, "status": trial.status,
                "latency_us": trial.latency_us, "verified": trial.verified, "error": trial.error,
            }
            for trial in self
        )  # fmt: skip

    def _repr_html_(self) -> str:
        from autotax.report.charts import first_search

        return first_search(self) or repr(self)


def trials(problem: Problem | None = None, *, status: str | None = None, db: str | Path | None = None) -> Trials:
    """The stored trials: `autotax trials`.

    Args:
        problem: None: all problems.
        status: One of `TRIAL_STATUSES`, for instance `ok`. None: all.
        db: As in `tune`.

    Returns:
        The trials in the order in which they were stored.

    Raises:
        UsageError: Bad input.
    """
    if problem is not None:
        require_problem(problem)
    if status is not None and status not in TRIAL_STATUSES:
        raise UsageError(f"status is {status!r}; allowed are {', '.join(TRIAL_STATUSES)}: give one of these")
    with Store.open(db, create=False) as store:
        return Trials(store.trials(problem, status=status))


def compare(
    problem: Problem, *, every_variant: bool = False, conditions: Conditions | None = None, timeout_s: float | None = None,
    db: str | Path | None = None, backend: str | None = None,
) -> Comparison:  # fmt: skip
    """Measures the tuned config, BSP and the operator's peers in one interleaved and verified run: `autotax compare`.

    Args:
        problem: The problem to compare.
        every_variant: Add a row for each variant, with its best known config.
        conditions: As in `tune`.
        timeout_s: Seconds for the call, the start of the ranks included. None: no limit.
        db: As in `tune`.
        backend: As in `tune`.

    Returns:
        The comparison. If it has no rows, `error` says why: the time was up, for instance.

    Raises:
        UsageError: Bad input, before anything is started.
        MachineError: The machine or the database failed.
    """
    limit = TimeLimit(timeout_s)
    hardware = machine.detect(backend)
    check_problems([problem], hardware)
    with ranks(hardware, problem.world_size) as runner:
        return compare_on(runner, problem, hardware, as_deployed(conditions, hardware), db, every_variant, limit)


def compare_on(
    runner: runners.LiveRunner, problem: Problem, hardware: Hardware, conditions: Conditions, db: str | Path | None,
    every_variant: bool, limit: TimeLimit | None = None,
) -> Comparison:  # fmt: skip
    """Compares on ranks that run already: see `compare`. The comparison has the answer of its look-up."""
    answer = lookup(problem, hardware=hardware, db=db, conditions=conditions)
    space = space_for(problem, hardware)
    with Store.open(db, create=False) as store:
        trials = trials_here(store, space, conditions)
        baseline = baseline_for(answer, store, trials, space, conditions)
    shown = shown_variants(problem, hardware, list(space.variants), every=every_variant)
    comparison = tuner.compare(
        problem,
        hardware=hardware,
        runner=runner,
        tuned=Choice(Config(answer.variant, answer.params), f"look-up: {answer.match}"),
        baseline=baseline,
        variants=[baseline if variant == baseline.config.variant else best_of(variant, trials, space) for variant in shown],
        conditions=conditions,
        limit=limit,
    )
    return replace(comparison, answer=answer)


def tune_callable(
    make: Callable[[Mapping[str, Value], Context], Callable[..., Any]], *, tunables: Mapping[str, Sequence[Value]],
    inputs: Callable[[Draw], Call], reference: Callable[[Sequence[Call], int], Tensor],
    baseline: Callable[[Context], Callable[..., Any]], name: str | None = None, dtype: str = "bf16",
    world_size: int | None = None, backend: str | None = None, **settings: Any,
) -> Verdict:  # fmt: skip
    """Tunes one function of yours, without declaring an operator. Figures, proofs and the database are those of `tune`.

    All functions have names and belong to a module, a script or notebook cells. Ranks import the former; of cells, the source
    of the functions and of what they refer to is kept in a file.

    Args:
        make: The function `make(params, context)`, which returns a callable of the inputs and the output. Every rank calls it at
            once, so symmetric memory comes from `context.heap`. The callable enqueues its work through `context` (launch,
            copy, matmul, collectives), which only compiles in a rehearsal.
        tunables: The values of each parameter, the first of which are tried first.
        inputs: The function `inputs(draw)`. Returns the inputs of a rank.
        reference: The function `reference(calls, rank)`. Returns the correct float32 output of a rank.
        baseline: The function `baseline(context)`. Returns the bulk-synchronous callable.
        name: The name of the problem. Default: that of the function.
        dtype: The type of inputs and output: bf16, fp16 or fp32.
        world_size: The number of ranks. Default: all GPUs of this machine, or two CPU ranks.
        backend: As in `tune`.
        settings: As in `tune`.

    Returns:
        The verdict: the winner, the finalists and how trials ended.

    Raises:
        UsageError: Bad input, before anything is started.
        MachineError: The machine or the database failed.
    """
    from autotax.declare import declare

    hardware = machine.detect(backend)
    world = hardware.default_world_size if world_size is None else world_size
    functions: dict[str, Callable[..., Any]] = {"make": make, "inputs": inputs, "reference": reference, "baseline": baseline}
    return tune(declare(functions, tunables, name)(dtype=dtype, world_size=world), backend=backend, **settings)


@contextmanager
def ranks(hardware: Hardware, world_size: int, seed: int = 0) -> Iterator[runners.LiveRunner]:
    """Ranks that start when first used and are gone at the end. Raises MachineError if they do not start."""
    from autotax.core.errors import MachineError
    from autotax.runner.local_runner import GroupLost

    runner = runners.LiveRunner(hardware, world_size, seed=seed)
    try:
        yield runner
    except GroupLost as loss:
        raise MachineError(f"{world_size} ranks on {hardware} do not start ({loss}): run `autotax doctor`") from loss
    finally:
        runner.close()


@dataclass(frozen=True)
class _Calls:
    """A listener of functions."""

    progress: Callable[[Progress], None]
    notice: Callable[[str], None]


@dataclass(frozen=True)
class _Both:
    """Two listeners as one."""

    first: Listener
    second: Listener

    def progress(self, progress: Progress) -> None:
        self.first.progress(progress)
        self.second.progress(progress)

    def notice(self, text: str) -> None:
        self.first.notice(text)
        self.second.notice(text)


def _ignore(_: object) -> None:
    pass
