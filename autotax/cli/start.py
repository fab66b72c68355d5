"""THE WAY IN of the command `autotax`: what is asked to end before its imports are done ends in one line too."""

from __future__ import annotations

import signal
import sys

from autotax.core.terminal import settle_sizes


def main() -> int:
    """See autotax.cli.app.main."""
    settle_sizes()
    try:
        from autotax.cli.app import main

        return main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("autotax: interrupted", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is impatient gets the same answer


if __name__ == "__main__":
    sys.exit(main())
