"""A terminal shows control characters in texts of files and databases; it never executes them."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table

from autotax.cli.messages import say
from autotax.core.terminal import NARROWEST, console, printable, settle_sizes
from autotax.report import tables
from tests.db.conftest import HARDWARE, PROBLEM, a_trial
from tests.db.test_exchange import an_entry

EVIL = "\x1b]0;owned\x07[bold red]x[/bold red]\x9b31m\u202e\r[link=http://evil]y"


def safe(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_what_is_printable_stays_as_it_is() -> None:
    assert printable("m 512 x 7168, 1.31x\n┃ ünïcödé ☃") == "m 512 x 7168, 1.31x\n┃ ünïcödé ☃"
    assert printable("a\x1bb\x00\udcff") == "a\\x1bb\\x00\\udcff"


def shown(table: object) -> str:
    out = console(width=400)
    out.file = io.StringIO()
    out.print(table)
    return out.file.getvalue()


def test_tables_show_markup_and_escapes_as_text() -> None:
    table = Table("name")
    table.add_row(EVIL)
    assert safe(shown(table)) and "[bold red]x[/bold red]" in shown(table) and "\\x1b]0;owned" in shown(table)


def test_what_a_file_names_is_shown() -> None:
    """A table shows hardware, users and errors exactly as in the file or row."""
    entry = an_entry(by=EVIL, hardware=replace(HARDWARE, device=EVIL))
    exported = shown(tables.exported(Path("winners.json"), [entry]))
    assert safe(exported) and "[bold red]x[/bold red]" in exported
    trials = shown(tables.trials(PROBLEM, [a_trial(status="crash", latency_us=None, error=EVIL)]))
    assert safe(trials) and "[bold red]x[/bold red]" in trials


def test_messages_are_one_line_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"file {EVIL}\n is malformed")
    message = capsys.readouterr().err
    assert safe(message) and message.count("\n") == 1 and "[bold red]x[/bold red]" in message


@pytest.mark.parametrize(
    ("said", "kept"),
    [("80", "80"), ("1", "20"), ("999999999", "4000")] + [(junk, None) for junk in ("", "0", "-1", "x", "²", "٣", "1" * 5000)],
)
def test_what_is_no_size_of_a_terminal_is_no_variable_any_more(
    monkeypatch: pytest.MonkeyPatch, said: str, kept: str | None
) -> None:
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.setenv(name, said)
    settle_sizes()
    assert [os.environ.get(name) for name in ("COLUMNS", "TERMINAL_WIDTH")] == [kept] * 2


def test_a_table_on_a_terminal_of_one_column() -> None:
    narrow = console(width=1)
    narrow.file = io.StringIO()
    narrow.print(tables.trials(PROBLEM, [a_trial()]))
    assert max(map(len, narrow.file.getvalue().splitlines())) == NARROWEST
