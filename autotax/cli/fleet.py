"""`autotax fleet tune`: many hosts, one list of problems, one database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotax.cli import options
from autotax.cli.messages import INTERRUPTED, say
from autotax.cli.options import DeployOptions, MachineOptions, ProblemOptions, SearchOptions, flags, number, seconds_of, word
from autotax.cli.problem_selection import jobs_of, missed, problems_of
from autotax.core.errors import UsageError

if TYPE_CHECKING:
    from autotax.fleet.messages import EngineOptions, FleetJob
    from autotax.hardware import Hardware

ABOUT = "Many hosts tune one list of problems into one PostgreSQL database."


@dataclass(frozen=True)
class FleetOptions:
    """The source of the hosts."""

    on: Annotated[str | None, word("The provider of the hosts: ray, ray:ADDRESS or slurm.")] = None
    hosts: Annotated[int | None, number("Number of hosts. Default: all that Ray has.")] = None
    slurm: Annotated[
        list[str] | None,
        typer.Option(help="An option of sbatch, for instance partition=h200. May be repeated.", show_default=False),
    ] = None
    logs: Annotated[Path, typer.Option(help="Folder for logs of Slurm tasks. All hosts must reach it.")] = Path("fleet-logs")
    lease: Annotated[str, typer.Option(help="Time after which the problem of a lost host goes to another host.")] = "60s"
    wait: Annotated[str, typer.Option(help="How long to wait for Ray's nodes at the start.")] = "10m"
    world_size: Annotated[int | None, number("Number of ranks. Default: the GPUs of each host.")] = None

    def asked(self, backend: str | None) -> EngineOptions:
        from autotax.fleet.messages import EngineOptions

        if self.on is None:
            raise UsageError("no engine given; allowed are ray, ray:ADDRESS, slurm: give one of these as --on")
        if self.hosts is not None and self.hosts < 1:
            raise UsageError(f"hosts is {self.hosts}; it must be at least 1: give another --hosts")
        engine, _, address = self.on.partition(":")
        pairs = [option.partition("=") for option in self.slurm or []]
        if pairs and engine != "slurm":
            raise UsageError("--slurm given, which is for --on slurm: take it out")
        parameters = {name.lstrip("-"): value if has_value else True for name, has_value, value in pairs}
        wait_s = seconds_of(self.wait, "wait") or 0.0
        return EngineOptions(engine, address, self.hosts, backend, parameters, self.logs.absolute(), wait_s)

    @property
    def lease_s(self) -> float:
        seconds = seconds_of(self.lease, "lease") or 0.0
        if seconds < 5.0:
            raise UsageError(f"lease is {self.lease}; it must be at least 5s: give another --lease")
        return seconds


def tune(hosts: FleetOptions, deployed: DeployOptions, how: SearchOptions, where: MachineOptions) -> int:
    """Tune a list of problems on many hosts, once for each kind of hardware; what is tuned already is skipped."""
    if (how.shapes is None) == (not how.misses):
        raise UsageError("a fleet tunes either the problems of a file or those missed: give --shapes FILE or --misses")
    what = ProblemOptions(world_size=hosts.world_size)
    conflicting = {"world_size": hosts.world_size, "mode": deployed.mode, "l2": deployed.l2, "skew": deployed.skew}
    if how.misses and (names := [name for name, value in conflicting.items() if value is not None]):
        raise UsageError(f"{flags(names)} given with --misses, which bring their own: take the others out")
    how.settings()
    from autotax.fleet.driver import Driver, new_order, open_engine
    from autotax.fleet.queue import server_url
    from autotax.fleet.screen import open_screen, show
    from autotax.hardware import detect

    if how.shapes is not None:  # read here only to report mistakes early: ranks and sizes depend on each host
        problems_of(what, how.shapes, detect("cpu"))
    url = server_url(where.db)
    if where.heap:
        raise UsageError("heap is a setting of each host of a fleet: set AUTOTAX_HEAP there, and leave --heap out")
    request = hosts.asked(where.backend)
    order = new_order(url, backend=where.backend, lease_s=hosts.lease_s)
    engine = open_engine(request)

    def jobs_for(hardware: Hardware) -> Sequence[FleetJob]:
        return jobs_on(hardware, what, deployed, how, where)

    with open_screen(where.as_json, answers=options.answers) as screen:
        outcome = Driver(order, engine, jobs_for, screen).run()
    show(outcome, where.as_json, options.answers)
    if outcome.interrupted:
        return say("interrupted; what was measured is kept: run the same command again to go on from there", INTERRUPTED)
    return 0 if outcome.done else 1


def jobs_on(
    hardware: Hardware, what: ProblemOptions, deployed: DeployOptions, how: SearchOptions, where: MachineOptions
) -> list[FleetJob]:
    """The jobs for one kind of hardware. Leaves out a problem that does not fit the hardware, with a message."""
    from autotax.fleet.messages import FleetJob

    settings = replace(how.settings(), conditions=deployed.conditions(hardware))
    if how.misses:
        return [FleetJob(problem, own) for problem, own in missed(what, deployed, how, where, hardware, settings)]
    jobs = []
    for problem in problems_of(what, how.shapes, hardware):
        try:
            jobs += [FleetJob(job, own) for job, own in jobs_of([problem], settings, hardware)]
        except UsageError as error:
            say(f"{problem} is left out on {hardware}: {error}")
    return jobs
