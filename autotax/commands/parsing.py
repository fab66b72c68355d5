"""Commands as the parser sees them: functions of groups of options, and its complaints in the words of this house."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import typer

from autotax.commands.saying import Failed

Command = Callable[..., int]
Options = dict[str, tuple[Any, Any]]
"""The type, annotated for Typer, and the default of each option by its name."""


def options_of(group: Any) -> Options:
    """The options of a group: the fields of a dataclass, or what a group says that is made of what is loaded."""
    if hasattr(group, "options"):
        told: Options = group.options()
        return told
    hints = get_type_hints(group, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in fields(group)}


def make_app(commands: Mapping[str, Command], families: Mapping[str, str], **about: Any) -> typer.Typer:
    """The commands by name, each a function that takes groups of options; Typer is shown the options themselves.

    A name of two words is a command of a family, of which `families` tells what it is for.
    """
    app = typer.Typer(**about)
    parents = {"": app} | {name: typer.Typer(name=name, help=told, add_completion=False) for name, told in families.items()}
    for name, function in commands.items():
        family, _, own = name.rpartition(" ")
        parents[family].command(own)(_flattened(function))
    for family in families:
        # A family of one command must still be named by two words.
        parents[family].callback()(lambda: None)
        app.add_typer(parents[family])
    return app


def _flattened(function: Command) -> Command:
    """A function of all options of a command, which fills its groups."""
    groups = {name: group for name, group in get_type_hints(function).items() if name != "return"}
    parts = {name: options_of(group) for name, group in groups.items()}
    options: Options = {}
    for part in parts.values():
        options |= part

    def run(**given: Any) -> int:
        filled = {name: groups[name](**{option: given[option] for option in part}) for name, part in parts.items()}
        try:
            return function(**filled)
        except KeyboardInterrupt:
            raise Failed("interrupted; what was under way is not kept") from None

    run.__doc__ = function.__doc__
    run.__annotations__ = {name: hint for name, (hint, _) in options.items()}
    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint) for name, (hint, default) in options.items()]
    )
    return run


def loads_in(arguments: list[str]) -> list[str]:
    """What the --load options of a command line name. They are read ahead of the parser, whose options depend on them."""
    found = []
    for at, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == "--load" and at + 1 < len(arguments):
            found.append(arguments[at + 1])
        elif argument.startswith("--load="):
            found.append(argument.partition("=")[2])
    return found


def explained(error: Any) -> str:
    """A complaint of the parser, with what it would have taken and what to do."""
    message = error.format_message().partition(" Did you mean")[0].rstrip(".")
    context = getattr(error, "ctx", None)
    allowed = ""
    if context is not None and hasattr(context.command, "commands"):
        allowed = f"; allowed are {', '.join(context.command.commands)}"
    elif context is not None and hasattr(error, "option_name"):
        options = [option for parameter in context.command.params for option in parameter.opts if option[:1] == "-"]
        allowed = f"; allowed are {', '.join(options)}"
    path = context.command_path if context is not None else "autotax"
    return f"{message[:1].lower()}{message[1:]}{allowed}: see `{path} --help`"
