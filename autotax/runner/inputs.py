"""The inputs and references of one problem on one rank, drawn once and kept for all its trials."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autotax.hardware import Hardware
from autotax.problem import Problem
from autotax.runner.reference import Inputs, make_inputs, reference

MOST_SETS = 32
CACHE_FACTOR = 3
"""How many times the L2 the rotating inputs fill, so that no call finds its own in it."""


class InputCache:
    """Input sets by seed. Even seeds are what is timed (full lengths), odd ones may be ragged."""

    def __init__(self, problem: Problem, rank: int, device: torch.device, hardware: Hardware) -> None:
        self.problem = problem
        self.rank = rank
        self.device = device
        self._sets: dict[int, Inputs] = {}
        self._references: dict[int, Tensor] = {}
        nbytes = self.get(0).nbytes
        wanted = math.ceil(CACHE_FACTOR * hardware.l2_bytes / nbytes) if hardware.on_gpu else 2
        self.rotation = [2 * i for i in range(min(MOST_SETS, max(2, wanted)))]
        """Seeds of the sets that timed calls rotate through."""

    def get(self, seed: int) -> Inputs:
        if seed not in self._sets:
            self._sets[seed] = make_inputs(self.problem, seed, self.rank, self.device)
        return self._sets[seed]

    def reference(self, seed: int) -> Tensor:
        if seed not in self._references:
            self._references[seed] = reference(self.problem, seed, self.rank, self.device)
        return self._references[seed]
