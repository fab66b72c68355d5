"""Agreeing at construction: what one rank cannot do, or sees otherwise, no rank may build on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from autotax.config import Config
from autotax.errors import UsageError
from autotax.hardware import Hardware
from autotax.heap.world import World
from autotax.problem import Problem

T = TypeVar("T")

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def told(values: Sequence[object]) -> str:
    """`rank 0: this; rank 1: that`."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def all_or_none(world: World | None, make: Callable[[], T]) -> T:
    """What `make` returns; where it raised on some rank, every rank raises: UsageError, or what it was on the rank itself.

    Collective.
    """
    if world is None:
        return make()
    value, cause = None, None
    try:
        value = make()
    except Exception as error:
        cause = error
    errors = world.gather(cause and (str(cause) or type(cause).__name__))
    if cause and not isinstance(cause, UsageError):
        raise cause
    if any(errors):
        raise UsageError(errors[0] if len(set(errors)) == 1 else told([line or "ready" for line in errors])) from cause
    return value  # type: ignore[return-value]


def require_alike(world: World | None, name: str, what: str) -> None:
    """Raises UsageError on every rank unless `what` is the same on all. Collective."""
    if world is not None and len(set(given := world.gather(what))) > 1:
        raise UsageError(f"{name} differs between the ranks ({told(given)}): give the same sizes and types on all")


def configs_for(
    world: World, problems: Sequence[Problem], hardware: Hardware, db: str | Path | None, config: Config | None
) -> tuple[list[Config | None], list[str]]:
    """For each problem the config that all ranks have for it, or None for the fallback; and what the user should know.

    Collective. Raises UsageError on every rank if one of them cannot read its database, or `config` is not admitted.
    """
    mine = all_or_none(world, lambda: [_answer(problem, hardware, db, config) for problem in problems])
    everybody = world.gather([answer and str(answer) for answer in mine])
    agreed: list[Config | None] = []
    differing = []
    for index, (problem, answer) in enumerate(zip(problems, mine, strict=True)):
        answers = [answers[index] for answers in everybody]
        if len(set(answers)) == 1:
            agreed.append(answer)
        else:
            agreed.append(None)
            differing.append(f"{problem.key} ({told([answer or 'bsp' for answer in answers])})")
    if not differing:
        return agreed, []
    return agreed, [f"the ranks have different configs for {', '.join(differing)}; give all ranks the same database"]


def _answer(problem: Problem, hardware: Hardware, db: str | Path | None, config: Config | None) -> Config | None:
    """The config of one problem on this rank, None for the fallback."""
    from autotax.spaces import space_for

    if config is None:
        from autotax.db.lookup import lookup

        answer = lookup(problem, hardware=hardware, db=db)
        return None if answer.match == "fallback" else Config(answer.variant, answer.params)
    if why_not := space_for(problem, hardware).why_not(config):
        raise UsageError(f"config is {config}; it cannot be used for {problem.key}: {why_not}")
    return config
