"""The entry point of the command `autotax`. An interrupt during its imports ends in one line too."""

from __future__ import annotations

import logging
import signal
import sys
import warnings

from autotax.core.errors import limit_met
from autotax.core.terminal import settle_sizes


def settle_warnings() -> None:
    """Undoes PYTHONWARNINGS=error, under which a warning of any library would end the command."""
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.resetwarnings()
        warnings.simplefilter("ignore")


def main() -> int:
    """Runs one command and returns its exit code: see autotax.cli.app.main."""
    settle_sizes()
    settle_warnings()
    logging.getLogger("sqlalchemy").addHandler(logging.NullHandler())  # its errors arrive as exceptions, too
    try:
        try:
            from autotax.cli.app import main
        except (ImportError, OSError, MemoryError) as error:
            print(f"autotax: {limit_met(error) or error}", file=sys.stderr)
            return 1
        return main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("autotax: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt must not print a traceback


if __name__ == "__main__":
    sys.exit(main())
