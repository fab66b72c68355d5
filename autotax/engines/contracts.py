"""Contracts with a framework: names and parameters, checked at registration and, by tests, in the published wheels."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotax.engines.watch import publish


@dataclass(frozen=True)
class Contract:
    """A function or a method of a module, and the names of its parameters, all of them in order."""

    module: str
    name: str
    parameters: tuple[str, ...]

    def broken(self) -> str:
        """The difference of the installed framework, in a few words; empty if there is none. Imports the module."""
        member: object = importlib.import_module(self.module)
        for part in self.name.split("."):
            member = inspect.getattr_static(member, part, None)
            if member is None:
                return f"there is no {self.module}.{self.name}"
        function = getattr(member, "__func__", member)
        names = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        return "" if names == self.parameters else f"{self.module}.{self.name} takes {', '.join(names) or 'nothing'}"


@dataclass(frozen=True)
class Part:
    """A replaced part of a framework: its name, its contracts, and a function that installs it or returns why it cannot."""

    name: str
    contracts: tuple[Contract, ...]
    install: Callable[[], str | None]


def first_broken(contracts: Sequence[Contract]) -> str:
    """The first contract that the installed framework breaks, in a few words; empty if it keeps all."""
    return next((broken for contract in contracts if (broken := contract.broken())), "")


def take(framework: str, parts: Sequence[Part], log: logging.Logger) -> None:
    """Installs each part whose contracts the framework keeps. Never raises: it logs a line for each other part."""
    try:
        importlib.import_module(framework.lower())
    except Exception as error:
        log.warning("autotax leaves %s as it is: %s", framework, _line(error))
        return
    taken = []
    for part in parts:
        try:
            reason = first_broken(part.contracts) or part.install() or ""
        except Exception as error:
            reason = _line(error)
        if reason:
            log.warning("autotax leaves %s of %s as they are: %s", part.name, framework, reason)
        else:
            taken.append(part.name)
    if taken:
        log.info("autotax takes %s of %s where winners are faster", " and ".join(taken), framework)
        publish(framework, log)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
