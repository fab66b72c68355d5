"""`autotax lookup`: the config that the run-time library would use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from autotax.cli.options import DeployOptions, MachineOptions, ProblemOptions, flag


@dataclass(frozen=True)
class LookupOptions:
    """The winners that may answer a look-up, and the form of the answer."""

    PANEL: ClassVar[str] = "Answer"

    allow_stale: Annotated[
        bool, flag("--allow-stale", "Let a winner answer that was measured elsewhere or with other software.")
    ] = False
    pin: Annotated[bool, flag("--pin", "Print only the config, as Python to paste into `config=`.")] = False


def lookup(what: ProblemOptions, deployed: DeployOptions, how: LookupOptions, where: MachineOptions) -> int:
    """Show the config that the run-time library would use here, and why."""
    what.require()
    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    from autotax.db.lookup import lookup as look_up
    from autotax.report import documents, tables

    answer = look_up(problem, hardware=hardware, db=where.db, conditions=conditions, allow_stale=how.allow_stale)
    if how.pin:
        where.plain(documents.pinned(answer))
    else:
        where.show(lambda: tables.answer(problem, hardware, answer))
    where.document(lambda: [documents.of_answer(problem, answer)])
    return 0
