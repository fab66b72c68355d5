"""`autotax export` and `autotax import`: winners in JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autotax.cli.options import MachineOptions, OperatorsOptions, flag, require_readable
from autotax.core.errors import UsageError


@dataclass(frozen=True)
class ExportOptions(OperatorsOptions):
    """The winners to export, and the file."""

    PANEL: ClassVar[str] = "Export"

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. Required.", show_default=False, metavar="FILE.json"),
    ] = None
    anonymous: Annotated[bool, flag("--anonymous", "Leave out who tuned each winner.")] = False

    def check(self) -> None:
        super().check()
        if self.output is None:
            raise UsageError("no file given; a path is needed: give one as --output")

    @property
    def file(self) -> Path:
        assert self.output is not None
        return self.output


@dataclass(frozen=True)
class ImportOptions:
    """The file to import."""

    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE.json", help="A file that `autotax export` wrote. Required.", show_default=False),
    ] = None

    def check(self) -> None:
        if self.file is None:
            raise UsageError("no file given; a file of `autotax export` is needed: name one")
        require_readable(self.file, "nothing was imported; give a file of `autotax export`")

    @property
    def path(self) -> Path:
        assert self.file is not None
        return self.file


def export(to: ExportOptions, where: MachineOptions) -> int:
    """Write winners to a JSON file, with where, when, by whom and with which software each was tuned."""
    from autotax.db.formats import write
    from autotax.db.url import shown
    from autotax.report import documents, tables

    ops, path, backends = to.operators, to.file, where.backends()
    with where.store(create=False) as store:
        entries = store.entries(ops, backends)
        if not store.exists:
            raise UsageError(f"there is no database {shown(store.url)}: tune something, or give another --db")
        if not entries:
            raise UsageError(f"database {shown(store.url)} holds no winners of {', '.join(ops)}: tune some, or give another --db")
    write(path, entries, anonymous=to.anonymous)
    about = {"file": str(path)}
    return where.answer(lambda: tables.exported(path, entries), lambda: list(map(documents.of_entry, entries)), about=about)


def import_(source: ImportOptions, where: MachineOptions) -> int:
    """Merge the winners of an exported file into the database. On conflict the better proven winner stays."""
    from autotax.db.formats import read
    from autotax.report import documents, tables

    backends = where.backends()
    entries = [entry for entry in read(source.path) if entry.winner.hardware.backend in backends]
    with where.store(create=True) as store:
        outcomes = store.merge(entries, source.path.name)
    about = {"file": str(source.path)}
    return where.answer(lambda: tables.imported(source.path, outcomes), lambda: documents.of_import(outcomes), about=about)
