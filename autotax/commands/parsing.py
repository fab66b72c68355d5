"""Commands as the parser sees them: functions of groups of options, and its complaints in the words of this house."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import typer

from autotax.commands.saying import Failed

Command = Callable[..., int]


def command(app: typer.Typer) -> Callable[[Command], Command]:
    """Makes a command of a function that takes groups of options; Typer is shown the options themselves."""

    def register(function: Command) -> Command:
        groups = {name: group for name, group in get_type_hints(function).items() if name != "return"}
        hints: dict[str, Any] = {}
        for group in groups.values():
            hints |= get_type_hints(group, include_extras=True)
        defaults = {field.name: field.default for group in groups.values() for field in fields(group)}

        def run(**given: Any) -> int:
            filled = {name: group(**{field.name: given[field.name] for field in fields(group)}) for name, group in groups.items()}
            try:
                return function(**filled)
            except KeyboardInterrupt:
                raise Failed("interrupted; what was under way is not kept") from None

        run.__doc__ = function.__doc__
        run.__annotations__ = hints
        run.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name]) for name in hints]
        )
        app.command(function.__name__.rstrip("_"))(run)
        return function

    return register


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
