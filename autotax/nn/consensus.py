"""Agreement at construction: all ranks use a config only if every rank has it and can prepare it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.settings import is_on
from autotax.hardware import Hardware
from autotax.heap.world import World, all_or_none, by_rank
from autotax.nn.groups import capturing
from autotax.software import environment

if TYPE_CHECKING:
    from autotax.db.records import Place
    from autotax.db.reproof import Bound

log = logging.getLogger("autotax")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def require_alike(world: World | None, name: str, what: str) -> None:
    """Raises UsageError on every rank unless `what` is the same on all. Collective."""
    if world is not None and len(set(calls := world.gather(what, str))) > 1:
        raise UsageError(f"{name} differs between the ranks ({by_rank(calls)}): give the same sizes, types and conditions on all")


def deployed_as(conditions: Conditions | None, on_gpu: bool) -> Conditions:
    """These conditions, or the usual ones. Raises UsageError for another type."""
    if conditions is None:
        return Conditions.usual(on_gpu)
    if not isinstance(conditions, Conditions):
        raise UsageError(f"conditions is {conditions!r}; it must be an autotax.core.conditions.Conditions: give one, or none")
    return conditions


def configs_for(
    world: World,
    problems: Sequence[Problem],
    hardware: Hardware,
    conditions: Conditions,
    db: str | Path | None,
    config: Config | None,
    prove: bool | float = False,
    *,
    counted: bool = True,
) -> tuple[list[Config | None], list[str]]:
    """For each problem the config that all ranks have for it, or None for the fallback; and messages for the user.

    `prove`: have stale winners proven first, see prove_first. `counted`: a problem without a
    winner is a miss. Collective. Raises UsageError on every rank if a rank cannot read its database, or if `config` is not
    valid.
    """
    unproven = ""
    if config is None and prove is not False:
        unproven = prove_first(world, problems, hardware, conditions, db, prove)
    mine = all_or_none(world, lambda: [_answer(problem, hardware, conditions, db, config, counted) for problem in problems])
    everybody = world.gather([(chosen and str(chosen), stale) for chosen, stale in mine], list[tuple[str | None, str]])
    agreed: list[Config | None] = []
    differing = []
    unused: dict[str, list[str]] = {}
    for index, (problem, (chosen, _)) in enumerate(zip(problems, mine, strict=True)):
        answers = [answers[index] for answers in everybody]
        alike = len({name for name, _ in answers}) == 1
        agreed.append(chosen if alike else None)
        if not alike:
            differing.append(f"{problem.key} ({by_rank([name or _bsp(stale) for name, stale in answers])})")
        elif any(stale for _, stale in answers):
            reasons = [stale or "nothing is tuned" for _, stale in answers]
            unused.setdefault(reasons[0] if len(set(reasons)) == 1 else by_rank(reasons), []).append(problem.key)
    notes = [
        f"what is tuned for {', '.join(keys)} does not hold here ({reason}, or give conditions= as it was tuned)"
        for reason, keys in unused.items()
    ]
    if unproven:
        notes.append(unproven)
    if differing:
        notes.append(f"the ranks have different configs for {', '.join(differing)}; give all ranks the same database")
    return agreed, notes


INVARIANT_VARIABLES = ("VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")
"""Variables of serving engines that ask for results that no batch changes."""


def wants_invariance(requested: bool | None) -> bool:
    """Whether rows must not depend on how many there are: as given, else as a serving engine's variable asks."""
    return any(map(is_on, INVARIANT_VARIABLES)) if requested is None else requested


def warn_of_sizes(name: str) -> None:
    """Warns where a serving engine's variable asks for results that no batch changes, of a module that cannot give them."""
    if asking := next(filter(is_on, INVARIANT_VARIABLES), None):
        line = f"{name} chooses a config by the size of a call, and {asking} asks for results that no batch changes"
        warnings.warn(f"{line}: see batch invariance in docs/runtime.md", RuntimeWarning, stacklevel=3)


def invariant_config(
    world: World, problem: Problem, hardware: Hardware, conditions: Conditions, db: str | Path | None, config: Config | None
) -> Config:
    """One config for all sizes up to the problem's: this one, or the answer of a look-up. Collective.

    Raises UsageError on all ranks alike where rows would depend on how many there are, or ranks have different configs.
    """

    def mine() -> Config:
        if config is None:
            answer = lookup.invariant(problem, hardware=hardware, db=db, conditions=conditions)
            return Config(answer.variant, answer.params)
        if not registry.of(problem).is_invariant(problem, config):
            raise UsageError(f"config is {config}; its rows depend on how many there are: give another, or no batch_invariant")
        return config

    from autotax.db import lookup
    from autotax.operators import registry

    chosen = all_or_none(world, mine)
    everybody = world.gather(str(chosen), str)
    if len(set(everybody)) > 1:
        raise UsageError(f"the ranks have different configs ({by_rank(everybody)}): give all ranks the same database")
    return chosen


def _bsp(stale: str) -> str:
    return f"bsp, {stale}" if stale else "bsp"


def _answer(
    problem: Problem, hardware: Hardware, conditions: Conditions, db: str | Path | None, config: Config | None, counted: bool
) -> tuple[Config | None, str]:
    """The config of one problem on this rank, None for the fallback; and the reason, if its winners are not valid here."""
    from autotax.operators import registry

    if config is None:
        from autotax.db.lookup import lookup, peek

        answer = (lookup if counted else peek)(problem, hardware=hardware, db=db, conditions=conditions)
        if answer.match == "fallback":
            return None, answer.reason if answer.passed_over else ""
        return Config(answer.variant, answer.params), ""
    if not isinstance(config, Config):
        raise UsageError(f"config is {config!r}; it must be an autotax.core.config.Config: give one, or none for a look-up")
    if why_not := registry.of(problem).why_not(problem, hardware, config):
        raise UsageError(f"config is {config}; it cannot be used for {problem.key}: {why_not}")
    return config, ""


# Proof of stale winners at construction: the first rank of the group starts it; the others wait and leave their GPUs idle.

SLACK_S = 30.0
"""Seconds beyond the time for proving that the other ranks wait for the first."""


def prove_first(
    world: World,
    problems: Sequence[Problem],
    hardware: Hardware,
    conditions: Conditions,
    db: str | Path | None,
    prove: bool | float,
) -> str:
    """Proves stale winners of these problems, in bounded time. Returns the same text on all ranks: why some stay unproven, or "".

    The ranks look up again afterwards. `prove` is the same on all ranks; see reproof.bound_of. Collective, except while a graph
    is captured: nothing is proven then. Raises UsageError, on all ranks alike, if `prove` is no time.
    """
    from autotax.db import lookup, reproof  # opens no database before a look-up does
    from autotax.db.records import Place

    if prove is False or capturing(world.device):
        return ""
    here, problems = Place(hardware, environment(hardware.backend), conditions), list(reproof.serving(problems))

    def mine() -> tuple[reproof.Bound | None, bool, str]:
        bound = reproof.bound_of(prove)
        outdated, failures = reproof.stale(problems, here, db) if bound else ({}, {})
        return bound, bool(outdated), reproof.listed(failures)

    bound, needed, note = all_or_none(world, mine)
    states = world.gather((needed, f"autotax/proven/{uuid4()}", note), tuple[bool, str, str])
    if not any(needed for needed, _, _ in states):
        return next(filter(None, (note for *_, note in states)), "")
    # Waiting in an NCCL collective would keep the GPUs busy that the proof measures.
    store, done = dist.distributed_c10d._get_default_store(), states[0][1]
    if world.rank == 0:
        try:
            world.synchronize()
            note = _proven(problems, here, db, bound) or note
        finally:
            store.set(done, "1")
    else:
        longest = bound.whole(len(problems)) if bound else 0.0
        note = _wait(store, done, longest + reproof.GRACE_S + SLACK_S) or note
    reproof.forget()
    lookup.reload()
    return next(filter(None, world.gather(note, str)), "")


def _proven(problems: Sequence[Problem], here: Place, db: str | Path | None, bound: Bound | None) -> str:
    """Runs `prove` and logs what was proven. A failure becomes a note, and the module is bulk-synchronous."""
    from autotax.db import reproof

    started = time.monotonic()
    try:
        proof = reproof.prove(problems, here, db, bound) if bound else None
    except Exception as error:
        return f"stale winners could not be proven ({type(error).__name__}: {error})"
    if proof is None:
        return ""
    # A warning, because servers show no other lines of loggers that are not theirs.
    log.warning("autotax: %s, in %.0f s", proof, time.monotonic() - started)
    return reproof.listed(proof.unproven)


def _wait(store: dist.Store, key: str, seconds: float) -> str:
    """Waits for a key in short steps, so that Python can handle signals between them."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if store.check([key]):
            return ""
        time.sleep(0.05)
    return f"rank 0 did not end proving within {seconds:g} s"
