"""WHAT WE RELY ON in a framework: names and parameters, checked where they are taken and, by tests, in the published wheels."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """A function or a method of a module, and the names of its parameters, all of them in order."""

    module: str
    name: str
    parameters: tuple[str, ...]

    def broken(self) -> str:
        """What the installed framework has instead, in a few words; empty if it has this. Imports the module."""
        found: object = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = inspect.getattr_static(found, part, None)
            if found is None:
                return f"there is no {self.module}.{self.name}"
        function = getattr(found, "__func__", found)
        names = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        return "" if names == self.parameters else f"{self.module}.{self.name} takes {', '.join(names) or 'nothing'}"


def first_broken(contracts: Sequence[Contract]) -> str:
    """The first contract that the installed framework breaks, in a few words; empty if it keeps all."""
    return next((broken for contract in contracts if (broken := contract.broken())), "")
