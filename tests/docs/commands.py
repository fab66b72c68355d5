"""Writes docs/cli.md from the commands themselves.

    python -m tests.docs.commands > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import typer

from autotax.cli import app
from autotax.core.problem import about
from autotax.operators import operators
from tests.docs.prose import filled

HEAD = """# Commands

Made from the commands by `python -m tests.docs.commands > docs/cli.md`. `autotax COMMAND --help` shows the same.
[tuning.md](tuning.md) explains how the commands work together.
"""


def document() -> str:
    """The whole page."""
    commands = list(_commands(typer.main.get_command(app.make([])), "autotax"))
    known = {f"--{each.name.replace('_', '-')}" for kind in operators().values() for each in fields(kind.problem)}
    lines = {name: _lines(command, known) for name, command in commands}
    parts = [HEAD, "## Options of most commands\n", _common(lines), "## Sizes\n", *_sizes()]
    for name, command in commands:
        parts += [f"## {name}\n", " ".join((command.help or "").replace("\f", "").split()) + "\n"]
        told = (command.epilog or "").splitlines()
        if examples := [line.removeprefix("Example: ") for line in told if line.startswith("Example: ")]:
            parts.append("```\n" + "\n".join(examples) + "\n```\n")
        own = [line for line in lines[name] if line not in parts[2]]
        if any(known.intersection(each.opts) for each in command.params):
            own.append("- The [sizes](#sizes) of the operator.")
        parts.append("\n".join(own) + "\n" if own else "No other options.\n")
    return filled("\n".join(parts))


def _common(lines: dict[str, list[str]]) -> str:
    """The options that more than half of the commands have, with the commands that lack them."""
    found = []
    for line in dict.fromkeys(line for own in lines.values() for line in own):
        lacking = [name.removeprefix("autotax ") for name, own in lines.items() if line not in own]
        if 2 * len(lacking) < len(lines) and line not in found:
            found.append(line + (f" Not in {', '.join(f'`{name}`' for name in lacking)}." if lacking else ""))
    return "\n".join(found) + "\n"


def _sizes() -> list[str]:
    """Lists the size options of each operator, then the options that all operators share."""
    sizes = {name: [_size(each) for each in fields(each.problem)] for name, each in operators().items() if each.examples}
    shared = [line for line in next(iter(sizes.values())) if all(line in lines for lines in sizes.values())]
    parts = ["A command that takes an operator takes the options of its problem.\n"]
    for name, lines in sizes.items():
        parts.append(f"### {name}\n\n" + "\n".join(line for line in lines if line not in shared) + "\n")
    return [*parts, "### Every operator\n\n" + "\n".join(shared) + "\n"]


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands in the order of the help, those of families too."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from _commands(each, f"{name} {word}")


def _lines(command: Any, known: set[str]) -> list[str]:
    """Arguments and options, but for the sizes of operators."""
    told = [each for each in command.params if not each.hidden and each.name != "help"]
    named = [each.metavar.strip("[].") for each in told if each.param_type_name == "argument"]
    arguments = [f"- `{'OP' if '|' in name else name}`, an argument." for name in named]
    return arguments + [_option(each) for each in told if each.opts[0].startswith("-") and not known.intersection(each.opts)]


def _option(each: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted({*each.opts, *each.secondary_opts}, key=lambda name: (-len(name), name)))
    kind = "" if each.is_flag else f" {each.metavar or 'TEXT'}"
    text = " ".join((each.help or "").split()).rstrip(".")
    hidden = each.is_flag or each.default in (None, ()) or not each.show_default
    return f"- {names}{kind}: {text}." + ("" if hidden else f" Default: {each.default}.")


def _size(each: Any) -> str:
    default = "the GPUs present, or 2 CPU ranks" if each.name == "world_size" else each.default
    return f"- `--{each.name.replace('_', '-')}`: {about(each)}." + ("" if default is MISSING else f" Default: {default}.")


if __name__ == "__main__":
    print(document(), end="")
