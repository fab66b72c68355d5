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
    known = {f"--{field.name.replace('_', '-')}" for kind in operators().values() for field in fields(kind.problem)}
    lines = {name: _lines(command, known if _takes_sizes(command) else set()) for name, command in commands}
    parts = [HEAD, "## Options of most commands\n", _common(lines), "## Sizes\n", *_sizes()]
    for name, command in commands:
        parts += [f"## {name}\n", " ".join((command.help or "").replace("\f", "").split()) + "\n"]
        epilog = (command.epilog or "").splitlines()
        if examples := [line.removeprefix("Example: ") for line in epilog if line.startswith("Example: ")]:
            parts.append("```\n" + "\n".join(examples) + "\n```\n")
        own = [line for line in lines[name] if line not in parts[2]]
        if _takes_sizes(command):
            own.append("- The [sizes](#sizes) of the operator.")
        parts.append("\n".join(own) + "\n" if own else "No other options.\n")
    return filled("\n".join(parts))


def _takes_sizes(command: Any) -> bool:
    """Whether a command takes the options of a problem. Some have one that is called like a field of a problem."""
    return any("--dtype" in param.opts for param in command.params)


def _common(lines: dict[str, list[str]]) -> str:
    """The options that more than half of the commands have, with the commands that lack them."""
    options = []
    for line in dict.fromkeys(line for own in lines.values() for line in own):
        lacking = [name.removeprefix("autotax ") for name, own in lines.items() if line not in own]
        if 2 * len(lacking) < len(lines) and line not in options:
            options.append(line + (f" Not in {', '.join(f'`{name}`' for name in lacking)}." if lacking else ""))
    return "\n".join(options) + "\n"


def _sizes() -> list[str]:
    """Lists the size options of each operator, then the options that all operators share."""
    sizes = {name: [_size(field) for field in fields(kind.problem)] for name, kind in operators().items() if kind.examples}
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
    for word, subcommand in command.commands.items():
        yield from _commands(subcommand, f"{name} {word}")


def _lines(command: Any, known: set[str]) -> list[str]:
    """Arguments and options, but for the sizes of operators."""
    params = [param for param in command.params if not param.hidden and param.name != "help"]
    named = [param.metavar.strip("[].") for param in params if param.param_type_name == "argument"]
    arguments = [f"- `{'OP' if '|' in name else name}`, an argument." for name in named]
    return arguments + [
        _option(param) for param in params if param.opts[0].startswith("-") and not known.intersection(param.opts)
    ]


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted({*option.opts, *option.secondary_opts}, key=lambda name: (-len(name), name)))
    kind = "" if option.is_flag else f" {option.metavar or 'TEXT'}"
    text = " ".join((option.help or "").split()).rstrip(".")
    hidden = option.is_flag or option.default in (None, ()) or not option.show_default
    return f"- {names}{kind}: {text}." + ("" if hidden else f" Default: {option.default}.")


def _size(field: Any) -> str:
    default = "the GPUs present, or 2 CPU ranks" if field.name == "world_size" else field.default
    return f"- `--{field.name.replace('_', '-')}`: {about(field)}." + ("" if default is MISSING else f" Default: {default}.")


if __name__ == "__main__":
    print(document(), end="")
