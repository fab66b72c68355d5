"""The entry point of the command `autotax`. An interrupt during its imports ends in one line too."""

from __future__ import annotations

import signal
import sys

from autotax.core.terminal import settle_sizes


def main() -> int:
    """Runs one command and returns its exit code: see autotax.cli.app.main."""
    settle_sizes()
    try:
        from autotax.cli.app import main

        return main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("autotax: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt must not print a traceback


if __name__ == "__main__":
    sys.exit(main())
