"""The inputs and references of one problem on one rank, drawn once and kept for all its trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators.inputs import Call, make_inputs, reference
from autotax.operators.verification import Expected
from autotax.runner.measurement import Candidate, Effort
from autotax.runner.surroundings import Surroundings

MOST_SETS = 32
CACHE_FACTOR = 3
"""How many times the largest cache the rotating inputs fill, so that no call finds its own in it."""
VERIFIED = (0, 1)
SOAKED = (0, 1, 2, 3)
"""Input sets that a soak changes between; the last one only if sets are small beside the memory."""


class InputCache:
    """Input sets by seed. Even seeds are what is timed (normal numbers, full lengths), odd ones are ragged and have outliers."""

    def __init__(self, problem: Problem, rank: int, device: torch.device, hardware: Hardware) -> None:
        self.problem = problem
        self.rank = rank
        self.device = device
        self.hardware = hardware
        self._sets: dict[int, Call] = {}
        self._references: dict[int, Expected] = {}
        nbytes = self.get(0).nbytes
        wanted = math.ceil(CACHE_FACTOR * hardware.cache_bytes / nbytes) if hardware.on_gpu else 2
        self.rotation = [2 * i for i in range(min(MOST_SETS, max(2, wanted)))]
        """Seeds of the sets that timed calls rotate through when they must not find their inputs in the L2."""
        self.soaked = SOAKED if nbytes < (hardware.memory_gib << 30) / 32 else SOAKED[:-1]

    def draw(self, candidates: Sequence[Candidate], effort: Effort) -> None:
        """Draws what measuring the candidates will ask for, so that too little memory shows now, on every rank's account."""
        if any(candidate.conditions.in_place for candidate in candidates):
            self.surroundings  # noqa: B018
        timed = {seed for candidate in candidates for seed in self.timed(candidate.conditions)}
        soaked = self.soaked if effort.soak else ()
        for seed in sorted({*VERIFIED, *timed, *soaked}):
            self.get(seed)
        for seed in sorted({*VERIFIED, *sorted(timed)[:2], *soaked}):
            self.reference(seed)

    @cached_property
    def surroundings(self) -> Surroundings:
        """What stands around calls in place."""
        return Surroundings(self.device, CACHE_FACTOR * self.hardware.cache_bytes)

    def timed(self, conditions: Conditions) -> list[int]:
        """Seeds of the sets that timed calls take in turn."""
        return self.rotation if conditions.l2 == "cold" else [0]

    def get(self, seed: int) -> Call:
        if seed not in self._sets:
            self._sets[seed] = make_inputs(self.problem, seed, self.rank, self.device)
        return self._sets[seed]

    def reference(self, seed: int) -> Expected:
        if seed not in self._references:
            self._references[seed] = reference(self.problem, seed, self.rank, self.device)
        return self._references[seed]
