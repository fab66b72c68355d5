"""A DECLARATION says all that the house asks of an operator: its problem, inputs, reference, bounds, variants and peers.

Kernels and spaces are named, `module:name`, and imported when they are first used: a look-up imports neither torch nor Triton.
An object in place of a name serves notebooks and tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.operators.loading import load_entry_points

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.core.space import VariantSpace
    from autotax.hardware import Hardware
    from autotax.operators.inputs import Call, Draw

P = TypeVar("P", bound=Problem)

Role = Literal["baseline", "search", "ladder"]
BASELINE = "bsp"
"""The name of the baseline of every operator: bulk-synchronous."""
Named = str | Any
"""`module:name`, or the thing itself."""
Rates = Mapping[str, Any]
"""What a measurement noted of the machine beside it, for instance `copy_gbps`, a figure a rank."""


Right = Any
"""A float32 Tensor, or a pair of it and the spread of its elements."""
Reference = Callable[[P, Sequence["Call"], int], Right]


def _resolve(named: Named) -> Any:
    """What `module:name` names."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


def _place_of(named: Named) -> tuple[str, str]:
    """The module in which it is defined, and its name there; no name where only the object is known."""
    module, _, name = named.partition(":") if isinstance(named, str) else (str(named.__module__), "", "")
    return module, name


@dataclass(frozen=True)
class Step:
    """What a rung of the ladder takes away from the rung before it: the name of the tax, and what it is."""

    tax: str
    told: str


@dataclass(frozen=True)
class Implementation:
    """A name, and the `autotax.kernels.kernel.Kernel` behind it."""

    name: str
    kernel: Named

    @property
    def module(self) -> str:
        """The module of its kernel class."""
        return _place_of(self.kernel)[0]

    @property
    def place(self) -> tuple[str, str]:
        """The module and the name of its kernel class, where its sources begin."""
        return _place_of(self.kernel)

    def kernel_class(self) -> Any:
        """Imports Triton, as a rule."""
        return _resolve(self.kernel)


@dataclass(frozen=True)
class Variant(Implementation):
    """One way to compute the operator.

    `role`: `baseline` is what everything is compared with and falls back to; `search` is searched; `ladder` is measured to
    explain where time goes, and searched only where it has won before or is asked for by name. `space` takes (problem, hardware)
    and gives a VariantSpace, or None where the variant cannot be; without one the variant has no parameters. `leaves` names the
    workspace in which a call leaves something that callers may want; what the names mean is the operator's own affair.
    """

    space: Named | None = None
    role: Role = "search"
    step: Step | None = None
    leaves: str = ""

    def space_for(self, problem: Problem, hardware: Hardware) -> VariantSpace | None:
        """What may vary for this problem on this machine; None where the variant cannot be."""
        from autotax.core.space import VariantSpace

        if self.space is None:
            return VariantSpace(self.name, seeds=(Config(self.name),))
        found: VariantSpace | None = _resolve(self.space)(problem, hardware)
        return found


@dataclass(frozen=True)
class Peer(Implementation):
    """What others offer for the same, or a part of it: measured by `compare`, never stored.

    `modes`: `graph` and `eager` give a row each; none gives one row under the conditions of the comparison. A `part` does less
    than the whole, so it is a bound and no alternative; its row is called `row`.
    """

    modes: tuple[str, ...] = ("graph", "eager")
    part: str = ""
    row: str = ""
    where: Callable[[Any, Any], bool] = lambda problem, hardware: hardware.on_gpu  # noqa: ARG005

    def rows(self) -> list[str]:
        """The names of its rows in a comparison."""
        return [f"{self.name}-{mode}" for mode in self.modes] or [self.row or self.name]


class Operator(Generic[P]):
    """The declaration of one operator. Making it registers it: see `autotax.operators.registry`.

    `magnitudes` scales what inputs are drawn from; see `autotax.operators.inputs`.
    """

    def __init__(self, problem: type[P]) -> None:
        self.problem = problem
        self.name = problem.op
        self.variants: dict[str, Variant] = {}
        self.peers: dict[str, Peer] = {}
        self.bounds: dict[str, str] = {}
        """What each bound is, by its name."""
        self.examples: dict[bool, P] = {}
        """A problem that suits GPUs (True) and one that suits CPU ranks (False): `autotax tune` without an operator."""
        self._inputs: Callable[[P, Draw], Call] | None = None
        self._reference: Reference[P] | None = None
        self._bound: Callable[[P, Hardware, Rates], dict[str, float]] | None = None
        self.traits: str | None = None
        """The name of a module that tells what arithmetic says of a config: `base_us(problem)` and `traits(problem, hardware,
        config)`. A model of latencies learns from it; None: no such model."""
        _register(self)

    # What a declaration says

    def inputs(self, function: Callable[[P, Draw], Call]) -> Callable[[P, Draw], Call]:
        """Declares what a rank takes and where its output goes. On the device `meta` it serves offline compiling."""
        self._inputs = function
        return function

    def reference(self, function: Reference[P]) -> Reference[P]:
        """Declares the right output of a rank, float32, from the inputs of all ranks and without communication.

        A pair tells the spread of each element too: the root of the sum of the squares of its terms. Where inputs have outlier
        channels, an error is measured by it (`autotax.operators.verification`); else by the root mean square of the output.
        """
        self._reference = function
        return function

    def bound(self, **told: str) -> Callable[[Callable[[P, Hardware, Rates], dict[str, float]]], Any]:
        """Declares bounds in microseconds by name, each of which `told` explains; what is not known is left out."""

        def register(function: Callable[[P, Hardware, Rates], dict[str, float]]) -> Any:
            self.bounds |= told
            self._bound = function
            return function

        return register

    def example(self, *, on_gpu: P, on_cpu: P) -> None:
        """Declares the problems with which a newcomer begins."""
        self.examples = {True: on_gpu, False: on_cpu}

    def variant(
        self,
        name: str,
        kernel: Named,
        space: Named | None = None,
        role: Role = "search",
        step: Step | None = None,
        leaves: str = "",
    ) -> Variant:
        """Declares a way to compute the operator. Raises UsageError for a name that another kernel has, and for a baseline of
        another name than `bsp`.
        """
        if (role == "baseline") != (name == BASELINE):
            raise UsageError(f"{self.name} declares {name!r} as {role}; the baseline, and it alone, is {BASELINE!r}: rename it")
        self._require_free(name, kernel)
        self.variants[name] = Variant(name, kernel, space, role, step, leaves)
        return self.variants[name]

    def peer(self, name: str, kernel: Named, **more: Any) -> Peer:
        """Declares an alternative, or a part of the work: see Peer."""
        self._require_free(name, kernel)
        self.peers[name] = Peer(name, kernel, **more)
        return self.peers[name]

    def _require_free(self, name: str, kernel: Named) -> None:
        taken = self.variants.get(name) or self.peers.get(name)
        if taken and taken.module != _place_of(kernel)[0]:
            raise UsageError(
                f"{self.name} has a variant {name!r} of {taken.module} already: give that of {_place_of(kernel)[0]} another name"
            )

    # What the house asks

    @property
    def baseline(self) -> str:
        """The variant that everything is compared with and falls back to. Raises UsageError where none is declared."""
        if BASELINE not in self.variants:
            raise UsageError(f"{self.name} has no baseline: declare a variant {BASELINE!r} with role='baseline'")
        return BASELINE

    @property
    def ladder(self) -> list[Variant]:
        """The baseline and the steps from it, in their order; empty for an operator without steps."""
        steps = [variant for variant in self.variants.values() if variant.step]
        return [self.variants[self.baseline], *steps] if steps else []

    @property
    def part(self) -> Peer | None:
        """The part of the work that `compare` measures as a bound, if there is one."""
        return next((peer for peer in self.peers.values() if peer.part), None)

    def implementation(self, name: str) -> Variant | Peer:
        """The variant or peer of this name. Raises UsageError."""
        found = self.variants.get(name) or self.peers.get(name)
        if not found:  # an installed package may bring it
            load_entry_points()
            found = self.variants.get(name) or self.peers.get(name)
        if not found:
            raise UsageError(
                f"variant is {name!r}; {self.name} has {', '.join(self.variants)}: name one of these, or --load its module"
            )
        return found

    def spaces(self, problem: P, hardware: Hardware) -> dict[str, VariantSpace]:
        """The spaces of the variants that the problem and the machine admit, in the order in which seeds are tried."""
        found = ((name, variant.space_for(problem, hardware)) for name, variant in self.variants.items())
        return {name: space for name, space in found if space}

    def draw(self, problem: P, draw: Draw) -> Call:
        """What a rank takes, and room for its output."""
        if self._inputs is None:
            raise UsageError(f"{self.name} declares no inputs: add a function with @operator.inputs")
        return self._inputs(problem, draw)

    def right(self, problem: P, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor | None]:
        """The right output of a rank, float32, and the spread of its elements if it is declared."""
        if self._reference is None:
            raise UsageError(f"{self.name} declares no reference: add a function with @operator.reference")
        found = self._reference(problem, calls, rank)
        return found if isinstance(found, tuple) else (found, None)

    def bounds_us(self, problem: P, hardware: Hardware, rates: Rates) -> dict[str, float]:
        """No call takes less than the greatest of these, microseconds by name."""
        return self._bound(problem, hardware, rates) if self._bound else {}

    def traits_module(self) -> Any:
        """The module of `traits`, or None."""
        return importlib.import_module(self.traits) if self.traits else None

    def modules(self) -> Iterable[str]:
        """The modules of all kernels."""
        implementations: list[Variant | Peer] = [*self.variants.values(), *self.peers.values()]
        return dict.fromkeys(each.module for each in implementations)


declared: dict[str, Operator[Any]] = {}
"""All operators declared so far, by name."""


def _register(operator: Operator[Any]) -> None:
    """Registers a declaration. The same operator may be declared again by the same class, as when a notebook cell runs twice."""
    there = declared.get(operator.name)
    if there and _path_of(there.problem) != _path_of(operator.problem):
        raise UsageError(
            f"operator {operator.name!r} is declared by {there.problem.__module__} and by {operator.problem.__module__}: "
            "give one of them another name"
        )
    declared[operator.name] = operator


def _path_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
