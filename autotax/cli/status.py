"""`autotax status`: which calls of a running server tuned kernels ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from autotax.cli.messages import say
from autotax.cli.options import OutputOptions
from autotax.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Group

    from autotax.engines.plugin import Published


@dataclass(frozen=True)
class StatusOptions:
    """The process to look at."""

    PANEL: ClassVar[str] = "Process"

    pid: Annotated[
        int | None, typer.Argument(metavar="PID", help="A process of a server. Default: all of yours.", show_default=False)
    ] = None

    def check(self) -> None:
        """Raises UsageError for a number that no process has."""
        if self.pid is not None and self.pid < 1:
            raise UsageError(f"PID is {self.pid}; it must be the number of a process: give another, or none for all")


def status(of: StatusOptions, form: OutputOptions) -> int:
    """Show which calls of a running server tuned kernels ran, and why others did not."""
    from msgspec import to_builtins

    from autotax.engines.plugin import published, summary

    servers = published(of.pid)
    form.document(lambda: [to_builtins(process) for process in servers], ok=bool(servers))
    if not servers:
        whose = f"process {of.pid} publishes" if of.pid else "no process of yours publishes"
        no = " no" * bool(of.pid)
        return say(f"{whose}{no} counts: ranks of vLLM, SGLang and torchtitan do once autotax's plugin is loaded there", 1)
    form.show(lambda: _tables(servers))
    for process in servers:
        say(f"process {process.pid}: {summary(process)}")
    return 0


def _tables(servers: list[Published]) -> Group:
    from rich.console import Group

    from autotax.engines.plugin import CAPTURED
    from autotax.report.formatting import columns, grid

    tables = []
    for process in servers:
        table = grid(f"{process.framework}, process {process.pid}", CAPTURED)
        columns(table, "calls>", "operator", "runs", "why not ours")
        for call in process.calls:
            table.add_row(str(call.calls), f"{call.operator}{call.call}", call.runs, call.reason)
        tables.append(table)
    return Group(*tables)
