"""The commands: their table, their parser, and how they end.

Each command reads its options, makes one call and prints a table, or one JSON document with `--json`. The parser converts
functions of groups of options into commands, and its errors into our messages. Bad input ends a command with exit code 2 and one
line on stderr before a rank is started or a database is touched.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from copy import copy
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from autotax import __version__
from autotax.cli import compare, compile, doctor, fleet, new, options, refresh, results, share, tune
from autotax.cli.messages import (
    CLOSED,
    INTERRUPTED,
    LOST,
    Failed,
    Interrupted,
    deliver,
    drain,
    forgiving_stderr,
    hold_the_first_three,
    say,
)  # fmt: skip
from autotax.core.errors import MachineError, UsageError, did_you_mean, in_a_module, limit_met
from autotax.operators import load, operators
from autotax.operators.registry import broken

# Commands import torch, the database and tables in their functions, so that `--help` and errors come at once.

Function = Callable[..., int]
Options = dict[str, tuple[Any, Any]]
"""The type, annotated for Typer, and the default of each option by its name."""
PROBLEM = "PROBLEM"
"""Stands for a problem in examples."""
MANY = ("shapes", "misses", "model", "tp", "tokens", "train", "split", "engine")
"""Options that select problems without naming an operator."""


@dataclass(frozen=True)
class Command:
    """A function that takes groups of options, the panel of the help that lists it, and examples of its use."""

    run: Function
    panel: str
    examples: Sequence[str] = ()


TUNING, RESULTS, SHARING, CHECKING, WRITING = (
    "Tune and measure", "Look at results", "Share results", "Check", "Write kernels of your own",
)  # fmt: skip
COMMANDS: dict[str, Command] = {
    "tune": Command(tune.tune, TUNING, [
            "tune PROBLEM",
            "tune --shapes shapes.toml --trials 100",
            "tune --model config.json --tp 8 --tokens 1,16,64...8192 --dry-run",
        ]),
    "compare": Command(compare.compare, TUNING, ["compare PROBLEM", "compare --shapes shapes.toml --json > compare.json"]),
    "taxes": Command(compare.taxes, TUNING, ["taxes PROBLEM"]),
    "refresh": Command(refresh.refresh, TUNING, ["refresh", "refresh all-gather-gemm --all"]),
    "fleet tune": Command(fleet.tune, TUNING, ["fleet tune --on slurm --hosts 4 --shapes shapes.toml --db URL"]),
    "lookup": Command(results.lookup, RESULTS, ["lookup PROBLEM", "lookup PROBLEM --pin"]),
    "winners": Command(results.winners, RESULTS, ["winners", "winners flash-decode --csv > winners.csv"]),
    "trials": Command(results.trials, RESULTS, ["trials PROBLEM --top 5", "trials --status wrong_result"]),
    "report": Command(results.report, RESULTS, ["report compare.json --output report.html"]),
    "trace": Command(results.trace, RESULTS, ["trace PROBLEM --file trace.json"]),
    "status": Command(results.status, RESULTS, ["status", "status 12345"]),
    "export": Command(share.export, SHARING, ["export --output winners.json"]),
    "import": Command(share.import_, SHARING, ["import winners.json"]),
    "compile": Command(compile.compile_, CHECKING, ["compile PROBLEM --target hip:gfx942"]),
    "doctor": Command(doctor.doctor, CHECKING, ["doctor", "doctor --report autotax.json"]),
    "new operator": Command(new.operator, WRITING, ["new operator my-sum"]),
    "new variant": Command(new.variant, WRITING, ["new variant my-push"]),
}
FAMILIES = {"fleet": fleet.ABOUT, "new": new.ABOUT}
ABOUT = "Finds, proves and remembers the fastest fine-grained distributed kernels for your GPUs."


# The parser.

def options_of(group: Any, op: str | None = None) -> Options:
    """The options of a group: the fields of a dataclass, or the group's `options(op)` if the command line names operator `op`."""
    if hasattr(group, "options"):
        options: Options = group.options(op)
        return options
    hints = get_type_hints(group, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in fields(group)}


def _epilog(program: str, name: str, command: Command, op: str | None) -> str:
    apply = [example for example in command.examples if op is None or not any(f"--{name}" in example for name in MANY)]
    lines = [f"Example: {program} {example.replace(PROBLEM, example_of(op))}" for example in apply]
    if "what" in get_type_hints(command.run) and op is None:
        lines.append(f"Sizes depend on the operator: {program} {name} all-gather-gemm --help")
    return "\n\n".join(lines)


def example_of(op: str | None) -> str:
    """An example problem as command-line options: of the operator `op`, or of the first operator."""
    operator = operators()[op] if op else next(iter(operators().values()))
    problem = operator.examples.get(True)
    sizes = {name: getattr(problem, name) for name in operator.problem.required()} if problem else {}
    return options.spelled(operator.name, sizes)


def _flattened(name: str, function: Function, op: str | None) -> Function:
    """A function of all options of a command, which fills its groups and checks them."""
    groups = {part: group for part, group in get_type_hints(function).items() if part != "return"}
    parts = {part: _in_panel(options_of(group, op), group, op) for part, group in groups.items()}
    together: Options = {}
    shared: set[str] = set()
    for part in parts.values():
        shared |= together.keys() & part.keys()
        together |= part

    def run(**values: Any) -> int:
        options.command, options.op = name, values.get("op")
        operator = operators().get(values.get("op") or "")
        if operator and (twice := shared & {attribute.name for attribute in fields(operator.problem)}):
            field = options.flags(sorted(twice))
            raise UsageError(f"{operator.name} has a field {field}, which is an option of autotax {name}: rename the field")
        filled = {part: groups[part](**{option: values[option] for option in own}) for part, own in parts.items()}
        try:
            for group in filled.values():
                if hasattr(group, "check"):
                    group.check()
            # With --json the document is the only thing on stdout, whatever a loaded module prints.
            with redirect_stdout(sys.stderr) if values.get("as_json") else nullcontext():
                return function(**filled)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; unfinished work is not kept") from None
        except SystemExit as ended:  # no command raises it: 0 would pass for success
            if isinstance(ended.__context__, BrokenPipeError):  # the library that prints tables does
                raise ended.__context__ from None
            raise Failed(f"a loaded module ended the program (exit code {ended.code}): mend it, or take it out") from None

    run.__doc__ = function.__doc__
    run.__annotations__ = {option: hint for option, (hint, _) in together.items()}
    own = Parameter.KEYWORD_ONLY
    signature = [Parameter(option, own, default=default, annotation=hint) for option, (hint, default) in together.items()]
    run.__signature__ = Signature(signature)  # type: ignore[attr-defined]
    return run


def _in_panel(options: Options, group: Any, op: str | None) -> Options:
    """The same options in the panel of their group. Options for many problems are hidden where an operator is named."""
    placed: Options = {}
    for name, (hint, default) in options.items():
        kind, about = hint.__origin__, copy(hint.__metadata__[0])
        about.rich_help_panel = about.rich_help_panel or getattr(group, "PANEL", None)
        about.hidden = about.hidden or (op is not None and name in MANY)
        placed[name] = Annotated[kind, about], default
    return placed


def loads_in(arguments: Sequence[str]) -> list[str]:
    """The values of the --load options of a command line. They are read first, because other options depend on them."""
    values = []
    for at, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == "--load" and at + 1 < len(arguments):
            values.append(arguments[at + 1])
        elif argument.startswith("--load="):
            values.append(argument.partition("=")[2])
    return values


def explained(error: Any, op: str | None) -> str:
    """An error of the parser in one line, with the allowed values or a similar name, and the remedy. `op`: the operator given."""
    message = error.format_message().partition(" Did you mean")[0].partition(" (Possible options")[0].rstrip(".")
    context = getattr(error, "ctx", None)
    allowed: list[str] = []
    word = ""
    if context is not None and hasattr(context.command, "commands") and not getattr(error, "option_name", None):
        allowed = list(context.command.commands)
        word = message.partition("'")[2].rstrip("'")
    elif context is not None and hasattr(error, "option_name"):
        # Short names give bad suggestions: "-" alone is similar to all of them.
        allowed = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
        word = error.option_name
    path = context.command_path if context is not None else "autotax"
    if op and "op" in (parameter.name for parameter in getattr(getattr(context, "command", None), "params", ())):
        path += f" {op}"
    text = f"{message[:1].lower()}{message[1:]}"
    if guess := did_you_mean(word, allowed) if word else "":
        return f"{text}: {guess} See `{path} --help`"
    if allowed:
        text += f"; allowed are {', '.join(allowed)}"
    return f"{text}: see `{path} --help`"


# Entry point and error exits


def heed_signals() -> None:
    """Makes SIGTERM and SIGHUP (a batch system's time limit, a closed terminal) end the command as Ctrl-C does.

    The current trial then does not count as failed. Ignored signals stay ignored, as under nohup.
    """
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal_number, signal.default_int_handler)


def make(arguments: Sequence[str], commands: Mapping[str, Command] = COMMANDS, name: str = "autotax") -> typer.Typer:
    """The commands for a command line. If the line names an operator, the help lists the options of that operator only.

    A name of two words is a command of a family. Typer sees the single options instead of groups.
    """
    families = {name: text for name, text in FAMILIES.items() if any(whole.startswith(f"{name} ") for whole in commands)}
    typed = os.environ.get("COMP_WORDS", "").split()  # the words that a shell wants completed
    op = options.operator_named([*arguments, *typed])
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name=name, help=ABOUT, pretty_exceptions_enable=False, context_settings=settings)
    app.callback()(_first)
    parents = {"": app} | {family: typer.Typer(name=family, help=text, add_completion=False) for family, text in families.items()}
    for whole, command in commands.items():
        family, _, own = whole.rpartition(" ")
        declare = parents[family].command(own, epilog=_epilog(name, whole, command, op), rich_help_panel=command.panel)
        declare(_flattened(whole, command.run, op))
    for family in families:
        # A family of one command must still be named by two words.
        parents[family].callback()(lambda: None)
        app.add_typer(parents[family], rich_help_panel=next(c.panel for n, c in commands.items() if n.startswith(f"{family} ")))
    return app


def _tell_version(requested: bool) -> None:
    if requested:
        print(f"autotax {__version__}")
        raise typer.Exit


def _first(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(
    arguments: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS, name: str = "autotax"
) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted.

    Args:
        arguments: The command line without the program; that of this process by default.
        commands: The commands by name. Scripts outside the package give their own.
        name: The program in usage lines.
    """
    heed_signals()
    hold_the_first_three()
    with forgiving_stderr():
        try:
            return _checked(list(sys.argv[1:] if arguments is None else arguments), commands, name)
        except KeyboardInterrupt:
            return say("interrupted", INTERRUPTED)


def _checked(arguments: list[str], commands: Mapping[str, Command], name: str) -> int:
    """Runs one command after checking that stdout is open and the working directory exists."""
    if sys.stdout is None:
        return say(CLOSED, 1)
    try:
        Path.cwd()
    except OSError as error:
        return say(f"the working directory is not there any more ({error.strerror}): change to another one", 1)
    try:
        code = _run(arguments, commands, name)
        deliver()
        return code
    except OSError as error:
        if error.errno not in LOST:
            raise
        drain(sys.stdout)
        return say(LOST[error.errno], 1)


def _run(arguments: list[str], commands: Mapping[str, Command], program: str) -> int:
    if not arguments or (len(arguments) == 1 and arguments[0] in FAMILIES):
        arguments = [*arguments, "--help"]
    options.command = next((argument for argument in arguments if not argument.startswith("-")), "")

    def end(message: str, code: int) -> int:
        if "--json" in arguments:
            options.print_document({"ok": False, "about": {}, "results": [], "error": {"code": code, "message": message}})
        return say(message, code)

    options.answers = sys.stdout
    try:
        with redirect_stdout(sys.stderr):  # a module may print when it is loaded
            for name in loads_in(arguments):
                load(name)
            app = typer.main.get_command(make(arguments, commands, program))
        for line in broken():
            say(line)
        return app.main(args=arguments, prog_name=program, standalone_mode=False) or 0
    except UsageError as error:
        return end(str(error), 2)
    except Failed as error:
        return end(str(error), error.code)
    except MachineError as error:
        return end(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return end("interrupted", INTERRUPTED)
    except SystemExit as ended:  # the parser exits silently on a broken pipe
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        raise
    except Exception as error:
        if met := limit_met(error):
            return end(met, 1)
        if isinstance(error, OSError):
            raise
        # Typer's own errors. Some versions of Typer contain their own click, so the class is unknown: test for the method.
        if type(error).__module__.partition(".")[0] in ("optuna", "sqlalchemy"):
            why = getattr(error, "orig", None) or error  # the error of SQLAlchemy itself repeats the statement
            return end(f"the database failed ({type(why).__name__}: {why}): run the same command again to go on", 1)
        if not hasattr(error, "format_message"):
            if place := in_a_module(error):
                return end(f"a module from outside fails: {place}: mend it, or take it out", 1)
            raise
        return end(explained(error, options.operator_named(arguments)), 2)
