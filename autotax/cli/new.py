"""`autotax new`: skeletons of operators and variants, each with its test, which run as they are."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autotax.cli.messages import say
from autotax.core.errors import UsageError
from autotax.core.files import write_whole
from autotax.operators import operators

ABOUT = "Write the skeleton of an operator or a variant of yours, with its test."
TEMPLATES = Path(__file__).parents[1] / "templates"
HOST = re.compile(r'op\.named\("([\w-]+)"\)')
"""The operator of a variant's template."""


@dataclass(frozen=True)
class SkeletonOptions:
    """The name of what is new, and the folder of its two files."""

    PANEL: ClassVar[str] = "Skeleton"

    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name, of a-z, 0-9, - and _: it names the files, too.", show_default=False)
    ]
    folder: Annotated[
        Path, typer.Option("--folder", help="Where to write. Default: here.", metavar="FOLDER", show_default=False)
    ] = Path()

    def check(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", self.name) or keyword.iskeyword(self.module):
            raise UsageError(f"name is {self.name!r}; allowed are a-z, 0-9, - and _ after a letter: give another NAME")
        if self.module in sys.stdlib_module_names or importlib.util.find_spec(self.module):
            raise UsageError(f"name is {self.name!r}, which is a module here already: give another NAME")
        if not self.folder.is_dir():
            raise UsageError(f"folder {self.folder} is not there: make it, or give another --folder")

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


def operator(what: SkeletonOptions) -> int:
    """Write an operator with a baseline, a kernel, a space and a test."""
    if what.name in operators():
        raise UsageError(f"operator {what.name!r} exists: give another NAME")
    file = _write(what, what.name, "operator")
    sizes = "--n 4096 --dtype fp32" if _on_cpu() else "--n 1048576"
    return _say_next(file, f"autotax tune {what.name} {sizes} --trials 4 --load {file}")


def variant(what: SkeletonOptions) -> int:
    """Write a variant of an operator of the package, with its kernel, its space and a test."""
    (host,) = HOST.findall((TEMPLATES / "variant.txt").read_text())
    if what.name in operators()[host].variants:
        raise UsageError(f"{host} has a variant {what.name!r}: give another NAME")
    file = _write(what, host, "variant", f', variants=["{what.name}"]')
    example = operators()[host].examples[not _on_cpu()]
    sizes = " ".join(f"--{name} {getattr(example, name)}" for name in (*type(example).required(), "dtype"))
    return _say_next(file, f"autotax tune {host} {sizes} --variants {what.name} --trials 4 --load {file}")


def _on_cpu() -> bool:
    from autotax.hardware import detect

    return not detect().on_gpu


def _write(what: SkeletonOptions, host: str, template: str, variants: str = "") -> Path:
    """Writes the module and its test, and returns the path of the module."""
    words = {"NAME": what.name, "MODULE": what.module, "OPERATOR": host, "VARIANTS": variants}
    words["CLASS"] = "".join(part.title() for part in what.module.split("_"))
    files = {what.folder / f"{what.module}.py": template, what.folder / f"test_{what.module}.py": "test"}
    if existing := [str(path) for path in files if os.path.lexists(path)]:
        exist = "exist" if len(existing) > 1 else "exists"
        raise UsageError(f"{' and '.join(existing)} {exist}: give another NAME, or another --folder")
    for path, source in files.items():
        text = re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], (TEMPLATES / f"{source}.txt").read_text())
        write_whole(path, text)
    return next(iter(files))


def _say_next(file: Path, tune: str) -> int:
    test = file.with_name(f"test_{file.name}")
    print(f"{file}\n{test}")
    say(f"written; next: {tune}")
    return say(f"and: python -m pytest {test}")
