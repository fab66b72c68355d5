"""The declaration of an operator: its problem, inputs, reference, bounds, variants and peers.

Kernels and spaces are given as `module:name` and imported at their first use, so a look-up imports neither torch nor Triton.
Notebooks and tests may pass an object instead of a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.settings import is_on

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.core.space import VariantSpace
    from autotax.hardware import Hardware
    from autotax.operators.inputs import Call, Draw

P = TypeVar("P", bound=Problem)

Role = Literal["baseline", "search", "ladder", "vendor"]
Place = Literal["product", "norm"]
BASELINE = "bsp"
"""The name of every operator's baseline (bulk-synchronous)."""
ONLY_OURS_VARIABLE = "AUTOTAX_ONLY_OURS"
"""The environment variable that leaves out variants of role `vendor`: from searches, look-ups and calls."""
Named = str | Any
"""`module:name`, or the object itself."""
Rates = Mapping[str, Any]
"""Machine rates recorded with a measurement, for instance `copy_gbps` with one figure per rank."""


Right = Any
"""The right output: a float32 Tensor, or a pair of that and the spread of its elements. Further outputs follow as such pairs."""
Reference = Callable[[P, Sequence["Call"], int], Right]


def _resolve(reference: Named) -> Any:
    """Imports and returns the object that `module:name` names."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _place_of(reference: Named) -> tuple[str, str]:
    """The module that defines the object, and its name there; the name is empty where only the object is known."""
    module, _, name = reference.partition(":") if isinstance(reference, str) else (str(reference.__module__), "", "")
    return module, name


@dataclass(frozen=True)
class Step:
    """A rung of the ladder: the name and the description of the tax that it removes compared with the rung before."""

    tax: str
    description: str


@dataclass(frozen=True)
class Implementation:
    """A name and its `autotax.kernels.kernel.Kernel` class."""

    name: str
    kernel: Named

    @property
    def module(self) -> str:
        """The module of its kernel class."""
        return _place_of(self.kernel)[0]

    @property
    def place(self) -> tuple[str, str]:
        """The module and the name of its kernel class; the source digest starts there."""
        return _place_of(self.kernel)

    def kernel_class(self) -> Any:
        """Imports and returns the kernel class; this usually imports Triton."""
        return _resolve(self.kernel)


@dataclass(frozen=True)
class Variant(Implementation):
    """One way to compute the operator.

    `role`: `baseline` is the reference of comparisons and the fallback; `search` is searched. `ladder` is measured to explain
    where time goes, and searched only where it won before or is requested by name; `vendor` is a Peer that may win. `space` maps
    (problem, hardware) to a VariantSpace, or to None where the variant does not apply; without it the variant has no parameters.
    `leaves` names a workspace with data of a call that callers may reuse; each operator defines these names. `invariant` says
    of a problem and a config whether rows of the output have the same bits for every number of rows up to that of the problem.
    """

    space: Named | None = None
    role: Role = "search"
    step: Step | None = None
    leaves: str = ""
    invariant: Callable[[Any, Config], bool] | None = None

    def space_for(self, problem: Problem, hardware: Hardware) -> VariantSpace | None:
        """The search space for this problem on this machine; None where the variant does not apply."""
        from autotax.core.space import VariantSpace

        if self.space is None:
            return VariantSpace(self.name, seeds=(Config(self.name),))
        space: VariantSpace | None = _resolve(self.space)(problem, hardware)
        return space


@dataclass(frozen=True)
class Peer(Variant):
    """Another implementation of the operator, or of a part of it, that `compare` measures.

    `modes`: `graph` and `eager` give one row each; without modes there is one row under the conditions of the comparison. A
    `part` does only a part of the work, so it is a bound, not an alternative; its row is called `row`. `where` says whether it
    applies to a problem on a machine.

    `served`: its calls can be captured, allocate nothing and write to the output, so it is also a variant that may win. Its
    winners hold for one version of torch.
    """

    role: Role = "vendor"
    modes: tuple[str, ...] = ("graph", "eager")
    part: str = ""
    row: str = ""
    where: Callable[[Any, Any], bool] = lambda problem, hardware: hardware.on_gpu  # noqa: ARG005
    served: bool = False

    def space_for(self, problem: Problem, hardware: Hardware) -> VariantSpace | None:
        """See Variant.space_for. None also with AUTOTAX_ONLY_OURS."""
        return super().space_for(problem, hardware) if not only_ours() and self.where(problem, hardware) else None

    def rows(self) -> list[str]:
        """The names of its rows in a comparison."""
        return [f"{self.name}-{mode}" for mode in self.modes] or [self.row or self.name]


def only_ours() -> bool:
    """Whether AUTOTAX_ONLY_OURS leaves out what others wrote."""
    return is_on(ONLY_OURS_VARIABLE)


class Operator(Generic[P]):
    """The declaration of one operator. Its constructor registers it: see `autotax.operators.registry`."""

    def __init__(self, problem: type[P]) -> None:
        self.problem = problem
        self.name = problem.op
        self.variants: dict[str, Variant] = {}
        self.peers: dict[str, Peer] = {}
        self.bounds: dict[str, str] = {}
        """The description of each bound, by its name."""
        self.examples: dict[bool, P] = {}
        """A problem that suits GPUs (True) and one that suits CPU ranks (False): used by `autotax tune` without an operator."""
        self._inputs: Callable[[P, Draw], Call] | None = None
        self._reference: Reference[P] | None = None
        self._bound: Callable[[P, Hardware, Rates], dict[str, float]] | None = None
        problem.measure = staticmethod(self._drawn_bytes)
        self.traits: str | None = None
        """The name of a module with analytical features of a config: `base_us(problem)` and `traits(problem, hardware, config)`.
        The latency model learns from them; None means no such model.
        """
        self.stricter: Callable[[P], tuple[P, float] | None] = lambda _: None
        """Maps a problem to a stricter one and a share, or to None. Winners of the stricter problem also serve this one. The
        share is the part of their speed-up over BSP that is expected to remain.
        """
        self.behind: Place = "product"
        """The work before its calls in a model, and so in place: a product, or a norm of sums over the ranks.

        The collective library gathers faster shortly after it has summed.
        """
        self.roofline: Named | None = None
        """A function of a problem: rough microseconds of any way to compute it. Look-ups estimate from it how a winner fares at
        other sizes of its bucket; None means equally well.
        """
        _register(self)

    # Methods that declare

    def inputs(self, function: Callable[[P, Draw], Call]) -> Callable[[P, Draw], Call]:
        """Declares the function that makes a rank's inputs and output buffer. On device `meta` it serves offline compilation."""
        self._inputs = function
        return function

    def reference(self, function: Reference[P]) -> Reference[P]:
        """Declares the right output of a rank, float32, from the inputs of all ranks and without communication.

        The function may return a pair with the spread of each element: the root of the sum of the squares of its terms. With
        outlier channels in the inputs, errors are relative to the spread (`autotax.operators.verification`), else to the root
        mean square of the output. For a call that writes further outputs (`Call.written`) it returns a list of pairs: that of the
        output first, then one for each of them.
        """
        self._reference = function
        return function

    def bound(self, **descriptions: str) -> Callable[[Callable[[P, Hardware, Rates], dict[str, float]]], Any]:
        """Declares bounds in microseconds by name; `descriptions` describes each. The function leaves out unknown bounds."""

        def register(function: Callable[[P, Hardware, Rates], dict[str, float]]) -> Any:
            self.bounds |= descriptions
            self._bound = function
            return function

        return register

    def example(self, *, on_gpu: P, on_cpu: P) -> None:
        """Declares the example problems for new users."""
        self.examples = {True: on_gpu, False: on_cpu}

    def variant(
        self,
        name: str,
        kernel: Named,
        space: Named | None = None,
        role: Role = "search",
        step: Step | None = None,
        leaves: str = "",
        invariant: Callable[[Any, Config], bool] | None = None,
    ) -> Variant:
        """Declares a way to compute the operator. Raises UsageError for a taken name, and for a baseline not named `bsp`."""
        if (role == "baseline") != (name == BASELINE):
            raise UsageError(f"{self.name} declares {name!r} as {role}; the baseline, and it alone, is {BASELINE!r}: rename it")
        self._require_free(name, kernel)
        self.variants[name] = Variant(name, kernel, space, role, step, leaves, invariant)
        return self.variants[name]

    def peer(self, name: str, kernel: Named, **more: Any) -> Peer:
        """Declares an alternative, or a part of the work: see Peer."""
        self._require_free(name, kernel)
        peer = self.peers[name] = Peer(name, kernel, **more)
        if peer.served:
            self.variants[name] = peer
        return peer

    def alternatives(self, problem: Problem, hardware: Hardware) -> list[Config]:
        """The default config of each alternative that can be served for a problem on a machine."""
        spaces = (peer.space_for(problem, hardware) for peer in self.peers.values() if peer.served)
        return [space.default() for space in spaces if space]

    def peer_and_tuned(self, name: str, kernel: str, **more: Any) -> None:
        """Declares an alternative, and the same one with configs of its own tuner: `NAME_tuned`, by the class `KERNELTuned`."""
        self.peer(name, kernel, **more)
        self.peer(f"{name}_tuned", f"{kernel}Tuned", **more)

    def _require_free(self, name: str, kernel: Named) -> None:
        taken = self.variants.get(name) or self.peers.get(name)
        if taken and taken.module != _place_of(kernel)[0]:
            raise UsageError(
                f"{self.name} has a variant {name!r} of {taken.module} already: give that of {_place_of(kernel)[0]} another name"
            )

    # Methods that query the declaration

    @property
    def baseline(self) -> str:
        """The variant that is the reference of comparisons and the fallback. Raises UsageError if none is declared."""
        if BASELINE not in self.variants:
            raise UsageError(f"{self.name} has no baseline: declare a variant {BASELINE!r} with role='baseline'")
        return BASELINE

    def lacking(self) -> list[str]:
        """The parts of the declaration that are missing, each with how to declare it."""
        parts = {
            "inputs: declare a function(problem, draw) with @operator.inputs": self._inputs,
            "a reference: declare a function(problem, calls, rank) with @operator.reference": self._reference,
            f"a baseline: declare operator.variant({BASELINE!r}, KERNEL, role='baseline')": BASELINE in self.variants,
            "a variant to search: declare operator.variant(NAME, KERNEL, SPACE)": set(self.variants) - {BASELINE},
            "an example: declare operator.example(on_gpu=PROBLEM, on_cpu=SMALL_PROBLEM)": self.examples,
        }
        return [what for what, part in parts.items() if not part]

    @property
    def ladder(self) -> list[Variant]:
        """The baseline and the variants with a step, in order; empty for an operator without steps."""
        steps = [variant for variant in self.variants.values() if variant.step]
        return [self.variants[self.baseline], *steps] if steps else []

    @property
    def part(self) -> Peer | None:
        """The part of the work that `compare` measures as a bound, if there is one."""
        return next((peer for peer in self.peers.values() if peer.part), None)

    def is_invariant(self, problem: P, config: Config) -> bool:
        """Whether rows of the output have the same bits for every number of rows up to that of the problem."""
        variant = self.variants.get(config.variant)
        return bool(variant and variant.invariant and variant.invariant(problem, config))

    def spaces(self, problem: P, hardware: Hardware) -> dict[str, VariantSpace]:
        """The spaces of the variants that apply to the problem and the machine, in the order in which seeds are tried."""
        pairs = ((name, variant.space_for(problem, hardware)) for name, variant in self.variants.items())
        return {name: space for name, space in pairs if space}

    def fallback(self, problem: P, hardware: Hardware) -> Config:
        """The config of the baseline that needs no tuning."""
        space = self.variants[self.baseline].space_for(problem, hardware)
        assert space is not None  # a baseline applies everywhere
        return space.default()

    def why_not(self, problem: P, hardware: Hardware, config: Config) -> str | None:
        """Why a config cannot run a problem on a machine, or None if it can."""
        variant = self.variants.get(config.variant)
        if space := variant and variant.space_for(problem, hardware):
            return space.why_not(config)
        return f"the variant is {config.variant}; allowed are {', '.join(self.spaces(problem, hardware))}"

    def draw(self, problem: P, draw: Draw) -> Call:
        """The inputs of a rank, and a buffer for its output."""
        if self._inputs is None:
            raise UsageError(f"{self.name} declares no inputs: add a function with @operator.inputs")
        return self._inputs(problem, draw)

    def _drawn_bytes(self, problem: P) -> int:
        """Bytes of a rank's inputs and output, drawn without memory."""
        import torch

        from autotax.operators.inputs import DTYPES, Draw

        return self.draw(problem, Draw(DTYPES[problem.dtype], 0, 0, torch.device("meta"))).nbytes

    def right(self, problem: P, calls: Sequence[Call], rank: int) -> list[tuple[Tensor, Tensor | None]]:
        """The right outputs of a rank, float32, each with the spread of its elements if it is declared."""
        if self._reference is None:
            raise UsageError(f"{self.name} declares no reference: add a function with @operator.reference")
        output = self._reference(problem, calls, rank)
        return output if isinstance(output, list) else [output if isinstance(output, tuple) else (output, None)]

    def bounds_us(self, problem: P, hardware: Hardware, rates: Rates) -> dict[str, float]:
        """Lower bounds of a call's time, in microseconds by name. The largest of them is the tightest."""
        return self._bound(problem, hardware, rates) if self._bound else {}

    def traits_module(self) -> Any:
        """The module of `traits`, or None."""
        return importlib.import_module(self.traits) if self.traits else None

    def roofline_us(self, problem: P) -> float:
        """Rough microseconds of any way to compute the problem; 1 where that is not declared."""
        return float(_resolve(self.roofline)(problem)) if self.roofline else 1.0

    def modules(self) -> Iterable[str]:
        """The modules of all kernels."""
        return dict.fromkeys(implementation.module for implementation in (*self.variants.values(), *self.peers.values()))


declared: dict[str, Operator[Any]] = {}
"""All operators declared so far, by name."""


def _register(operator: Operator[Any]) -> None:
    """Registers a declaration. The same operator may be declared again by the same class, as when a notebook cell runs twice."""
    former = declared.get(operator.name)
    if former and _path_of(former.problem) != _path_of(operator.problem):
        raise UsageError(
            f"operator {operator.name!r} is declared by {former.problem.__module__} and by {operator.problem.__module__}: "
            "give one of them another name"
        )
    declared[operator.name] = operator


def _path_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
