"""Cases that take seconds each: `make test-slow` runs them, `make test` the others. The list comes from the durations of a run:

    .venv/bin/python -m pytest -n 4 --dist loadfile -m 'not alone and not volume' --durations=0 -vv > LOG
    .venv/bin/python -m tests.slow LOG [LOG ...] > tests/slow.txt

What is slow in any of several logs is slow.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
LONGEST_S = 1.5
"""A case that takes longer is slow, with its own fixtures."""
SHARED_S = 20.0
"""Fixtures that take longer cost the first case of their file that uses them, whichever that is. So the file is slow."""
DURATION = re.compile(r" *([\d.]+)s (call|setup) +(tests/\S+?\.py)(::.*)")


def listed() -> frozenset[str]:
    """Ids of cases, and whole files."""
    return frozenset(LIST.read_text().splitlines())


def slow(log: str) -> list[str]:
    """The slow cases and files in the output of pytest."""
    cases, fixtures = Counter[str](), Counter[str]()
    for seconds, stage, file, name in (line.groups() for line in map(DURATION.fullmatch, log.splitlines()) if line):
        cases[file + name] += float(seconds)
        fixtures[file] += float(seconds) * (stage == "setup")
    files = {file for file, seconds in fixtures.items() if seconds > SHARED_S}
    ids = {name for name, seconds in cases.items() if seconds > LONGEST_S and name.partition("::")[0] not in files}
    return sorted(files | ids)


if __name__ == "__main__":
    print("\n".join(sorted({case for log in sys.argv[1:] for case in slow(Path(log).read_text())})))
