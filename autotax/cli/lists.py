"""`autotax winners` and `autotax trials`: lists from the database as tables, CSV or documents."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from autotax.cli.messages import say
from autotax.cli.options import (
    ListOptions,
    MachineOptions,
    OperatorsOptions,
    ProblemOptions,
    check_variants,
    flag,
    flags,
    number,
    word,
)
from autotax.core.errors import UsageError, did_you_mean
from autotax.core.settings import TRIAL_STATUSES
from autotax.operators import operators

if TYPE_CHECKING:
    from autotax.db import Store, TrialRecord

WORST_US = float("inf")


SORTS = ("number", "latency", "variant", "status")


@dataclass(frozen=True)
class TrialOptions(ListOptions):
    """The selection and the order of trials."""

    PANEL: ClassVar[str] = "List"

    top: Annotated[int | None, number("List only the first INT trials of each stage of each run. Default: all.")] = None
    sort: Annotated[
        str | None, word(f"Order: {', '.join(SORTS)}. Default: latency with --top, else number.", metavar="KEY")
    ] = None
    status: Annotated[
        str | None, word("List only trials with this status, for instance ok or wrong_result. Default: all.", metavar="NAME")
    ] = None
    variant: Annotated[str | None, word("List only trials of this variant. Default: all.", metavar="NAME")] = None
    errors: Annotated[bool, flag("--errors", "Print the errors of failed trials whole, with their tracebacks.")] = False

    def check(self) -> None:
        """Raises UsageError for an unknown number, order, status or variant."""
        if self.top is not None and self.top < 1:
            raise UsageError(f"top is {self.top}; it must be at least 1: give another --top")
        for name, value, allowed in (("sort", self.sort, SORTS), ("status", self.status, TRIAL_STATUSES)):
            if value is not None and value not in allowed:
                guess = did_you_mean(value, allowed) or f"give one of these as --{name}"
                raise UsageError(f"{name} is {value!r}; allowed are {', '.join(allowed)}: {guess}")
        check_variants([self.variant] if self.variant is not None else None)


def winners(of: OperatorsOptions, form: ListOptions, where: MachineOptions) -> int:
    """List the winners in the database, one line each, and whether each holds here."""
    _one_form(form, where)
    from autotax.db.records import Place, differences, same_devices
    from autotax.db.url import shown
    from autotax.hardware import detect
    from autotax.report import documents, tables
    from autotax.software import environment

    backends = where.backends()
    try:
        hardware = where.hardware()
    except UsageError:  # winners of another machine's backend are listed, too; none of them holds here
        hardware = detect("cpu")
    with where.store(create=False) as store:
        if not store.exists:
            say(f"there is no database {shown(store.url)} yet: run `autotax tune`")
        records = [winner for winner in store.winners(with_samples=False) if winner.problem.op in of.operators]
        records = [winner for winner in records if winner.hardware.backend in backends]
        filters = {"OP": " ".join(of.ops or ()), "--backend": where.backend}
        _tell_hidden(store, "winners", len(records), filters)
    here = environment(hardware.backend)
    why = [", ".join(differences(winner, winner.place, Place(hardware, here, winner.conditions))) for winner in records]
    if form.csv:
        where.plain(_csv([documents.flat_winner(winner, stale) for winner, stale in zip(records, why, strict=True)]))
    else:
        where.show(lambda: tables.winners(records, why, " ".join(of.ops or ())))
    where.document(lambda: [documents.of_winner(winner, stale) for winner, stale in zip(records, why, strict=True)])
    holding = {(winner.problem, winner.conditions) for winner, stale in zip(records, why, strict=True) if not stale}
    mine = [winner for winner in records if same_devices(winner.hardware, hardware)]
    if any((winner.problem, winner.conditions) not in holding for winner in mine) and not where.as_json:
        say("winners that do not hold because of other software can be proven again: run `autotax refresh`")
    return 0


def trials(what: ProblemOptions, which: TrialOptions, where: MachineOptions) -> int:
    """List the trials of a problem, or of all problems; failed ones with the reason."""
    _one_form(which, where)
    if what.op is None and what.given:
        raise UsageError(f"{flags(what.given)} given, but no operator; allowed are {', '.join(operators())}: name one")
    hardware = where.hardware() if what.op or where.backend else None
    problem = what.problem(hardware) if what.op and hardware else None
    from autotax.db.url import shown
    from autotax.report import documents, tables

    with where.store(create=False) as store:
        if not store.exists:
            say(f"there is no database {shown(store.url)} yet: run `autotax tune`")
        records = store.trials(problem, status=which.status)
        if where.backend:
            records = [trial for trial in records if trial.run and trial.run.hardware.backend == where.backend]
        if which.variant:
            records = [trial for trial in records if trial.config.variant == which.variant]
        filters = {"the problem": what.op, "--status": which.status, "--variant": which.variant, "--backend": where.backend}
        _tell_hidden(store, "trials", len(records), filters)
    records = _chosen([trial for trial in records if trial.error] if which.errors else records, which)
    if which.errors and not where.as_json:
        for error, failed in _errors(records).items():
            more = f", and {len(failed) - 1} more with the same error" if len(failed) > 1 else ""
            where.plain(f"{failed[0]}{more}\n{error}\n")
    elif which.csv:
        where.plain(_csv([documents.flat_trial(trial) for trial in records]))
    else:
        where.show(lambda: tables.trials(problem, records))
    about = {"problem": problem.to_dict()} if problem else {}
    where.document(lambda: [documents.of_trial(trial) for trial in records], about=about)
    return 0


def _tell_hidden(store: Store, kind: str, shown: int, filters: Mapping[str, str | None]) -> None:
    """Says how many records of the database an empty list leaves out, and how to see them. Records of operators that are not
    loaded are counted for every list.
    """
    counts = store.counts_by_operator(kind)
    unknown = {op: count for op, count in counts.items() if op not in operators()}
    filtered = " and ".join(name for name, value in filters.items() if value)
    if hidden := 0 if shown else sum(counts.values()) - sum(unknown.values()):
        others = f"{hidden} other {kind}" if hidden > 1 else f"1 other {kind.removesuffix('s')}"
        say(f"the database holds {others}: leave {filtered} out to see {'them' if hidden > 1 else 'it'}")
    if unknown and not any(filters.values()):
        names = ", ".join(f"{count} of {op}" for op, count in unknown.items())
        say(f"{kind} of operators that are not loaded are hidden ({names}): --load the modules that declare them")


def _one_form(form: ListOptions, where: MachineOptions) -> None:
    if form.csv and where.as_json:
        raise UsageError("--csv and --json given; allowed is one of them: take the other out")


def _chosen(records: Sequence[TrialRecord], which: TrialOptions) -> list[TrialRecord]:
    """The trials by run and stage, in the requested order, and at most the requested number of each run and stage."""
    sort = which.sort or ("latency" if which.top else "number")
    stages: dict[tuple[int, bool], list[TrialRecord]] = {}
    for trial in records:
        stages.setdefault((trial.run_id or 0, "stage" not in trial.conditions), []).append(trial)

    def key(trial: TrialRecord) -> tuple[Any, ...]:
        latency = WORST_US if trial.latency_us is None or not trial.verified else trial.latency_us
        by = {
            "number": (trial.id or 0,),
            "latency": (latency,),
            "variant": (trial.config.variant, latency),
            "status": (TRIAL_STATUSES.index(trial.status), latency),
        }
        return by[sort]

    return [trial for stage in sorted(stages) for trial in sorted(stages[stage], key=key)[: which.top]]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV of rows with equal keys; the keys are the first line. No line break at the end."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _errors(records: Sequence[TrialRecord]) -> dict[str, list[str]]:
    """The trials that failed with each error."""
    by_error: dict[str, list[str]] = {}
    for trial in records:
        by_error.setdefault(f"{trial.status}: {trial.error}", []).append(f"trial {trial.number}: {trial.config}")
    return by_error

