"""The commands. Each reads its options, makes one call and prints a table, or one JSON document with `--json`.

Bad input ends a command with exit code 2 and one line on stderr before a rank is started or a database is touched.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import typer

from autotax import __version__
from autotax.cli import compare, compile, doctor, fleet, lists, lookup, new, options, refresh, report, share, status, trace, tune
from autotax.cli.messages import INTERRUPTED, Failed, say
from autotax.cli.options import operator_named
from autotax.cli.parsing import Command, explained, loads_in, make_app
from autotax.cli.streams import CLOSED, LOST, deliver, drain, forgiving_stderr, hold_the_first_three
from autotax.core.errors import MachineError, UsageError, limit_met
from autotax.operators import load
from autotax.operators.registry import broken

# Commands import torch, the database and tables in their functions, so that `--help` and errors come at once.


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
    "lookup": Command(lookup.lookup, RESULTS, ["lookup PROBLEM", "lookup PROBLEM --pin"]),
    "winners": Command(lists.winners, RESULTS, ["winners", "winners flash-decode --csv > winners.csv"]),
    "trials": Command(lists.trials, RESULTS, ["trials PROBLEM --top 5", "trials --status wrong_result"]),
    "report": Command(report.report, RESULTS, ["report compare.json --output report.html"]),
    "trace": Command(trace.trace, RESULTS, ["trace PROBLEM --file trace.json"]),
    "status": Command(status.status, RESULTS, ["status", "status 12345"]),
    "export": Command(share.export, SHARING, ["export --output winners.json"]),
    "import": Command(share.import_, SHARING, ["import winners.json"]),
    "compile": Command(compile.compile_, CHECKING, ["compile PROBLEM --target hip:gfx942"]),
    "doctor": Command(doctor.doctor, CHECKING, ["doctor", "doctor --report autotax.json"]),
    "new operator": Command(new.operator, WRITING, ["new operator my-sum"]),
    "new variant": Command(new.variant, WRITING, ["new variant my-push"]),
}
FAMILIES = {"fleet": fleet.ABOUT, "new": new.ABOUT}
ABOUT = "Finds, proves and remembers the fastest fine-grained distributed kernels for your GPUs."


# Entry point and error exits


def heed_signals() -> None:
    """Makes SIGTERM and SIGHUP (a batch system's time limit, a closed terminal) end the command as Ctrl-C does.

    The current trial then does not count as failed. Ignored signals stay ignored, as under nohup.
    """
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal_number, signal.default_int_handler)


def make(arguments: Sequence[str], commands: Mapping[str, Command] = COMMANDS, name: str = "autotax") -> typer.Typer:
    """The commands for a command line. If the line names an operator, the help lists the options of that operator only."""
    about = {"name": name, "help": ABOUT, "pretty_exceptions_enable": False}
    families = {name: text for name, text in FAMILIES.items() if any(command.startswith(f"{name} ") for command in commands)}
    typed = os.environ.get("COMP_WORDS", "").split()  # the words that a shell wants completed
    return make_app(commands, families, __version__, operator_named([*arguments, *typed]), **about)


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
            raise
        return end(explained(error), 2)
