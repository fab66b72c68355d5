"""Hostile environments, generated: some variables at random, each unset or with a value that nobody would give it.

`environments(count, seed)` draws them. A HARMLESS variable changes no answer. A REFUSED one ends the command with
exit code 2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.adversarial.grammar import NO_DATABASES, NO_MODULES

FOLDERS = [None, "", " ", "/nowhere", "/dev/null", "relative", "~", "~nobody-here", "a\x1b[31m", "\udcff", "x" * 5000]
WORDS = [None, "", " ", "x", "\x1b[31m", "[red]x[/red]", "💥", "\udcff", "a\nb", "%s", "x" * 5000]
NUMBERS = [None, "", " ", "0", "-1", "1", "1e3", "nan", "²", "9" * 30, "1" * 5000, "x", "\udcff"]
LOCALES = [None, "", "C", "POSIX", "C.UTF-8", "xx_YY", "de_DE@euro", "\udcff"]

HARMLESS: dict[str, list[str | None]] = {
    **dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME"), FOLDERS),
    **dict.fromkeys(("USER", "LOGNAME", "USERNAME", "HOSTNAME", "SHELL", "EDITOR", "TZ", "CC", "PATH"), WORDS),
    **dict.fromkeys(
        ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"), WORDS
    ),
    **dict.fromkeys(("COLUMNS", "LINES", "TERMINAL_WIDTH", "AUTOTAX_WAIT_S", "AUTOTAX_CHECK", "AUTOTAX_MISSES"), NUMBERS),
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "WORLD_SIZE"), NUMBERS),
    **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT", "NVIDIA_VISIBLE_DEVICES", "SLURM_JOB_ID"), NUMBERS),
    **dict.fromkeys(("MASTER_ADDR", "TRITON_INTERPRET", "NCCL_DEBUG", "TORCH_LOGS", "COMP_WORDS", "_TYPER_COMPLETE"), WORDS),
    **dict.fromkeys(("LANG", "LC_ALL", "LC_CTYPE", "LANGUAGE"), LOCALES),
}
AT_START: dict[str, list[str | None]] = {
    "PYTHONIOENCODING": ["ascii", "latin-1", "utf-8:strict", "utf-16"],
    "PYTHONUTF8": ["0", "1"],
    "PYTHONOPTIMIZE": ["1", "2"],
    "PYTHONUNBUFFERED": ["1"],
    "PYTHONDONTWRITEBYTECODE": ["1"],
    "PYTHONHASHSEED": ["0", "77"],
    "PYTHONNODEBUGRANGES": ["1"],
    "PYTHONINTMAXSTRDIGITS": ["640"],
}
"""Variables that Python itself reads when it starts. Only tests that start a process set them."""
REFUSED = {"AUTOTAX_DB": [name for name in NO_DATABASES if name not in ("", "/dev/null/x") and "\0" not in name]}
REFUSED_AT_START = {"AUTOTAX_LOAD": [name for name in NO_MODULES if name not in ("", "1")]}
"""Variables that a process reads only once."""


@dataclass(frozen=True)
class HostileEnvironment:
    """`variables` to set, and with None to take out."""

    variables: dict[str, str | None]
    refused: bool = field(default=False)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value if value is None else value[:60]!r}" for name, value in self.variables.items())


def environments(count: int, seed: int, *, processes: bool = False) -> list[HostileEnvironment]:
    """`count` environments, the same for the same seed; one in five is refused. `processes`: also variables read at start only."""
    draw, surroundings = random.Random(seed), []
    known, refusals = HARMLESS | (AT_START if processes else {}), REFUSED | (REFUSED_AT_START if processes else {})
    for number in range(count):
        names = draw.sample(sorted(known), draw.randint(1, 6))
        variables = {name: draw.choice(known[name]) for name in names}
        if refused := number % 5 == 4:
            name = draw.choice(sorted(refusals))
            variables |= {name: draw.choice(refusals[name])}
        surroundings.append(HostileEnvironment(variables, refused))
    return surroundings
