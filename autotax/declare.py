"""One-off operators, which `autotax.tune_callable` makes from functions.

Ranks and compilers receive a one-off as one word: `callable:` and JSON with the places of its functions and its tunables. Loading
that word declares the same operator in their process.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from autotax import cells
from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.core.files import Integer, Name, from_json
from autotax.core.problem import Problem, dtype, ranks
from autotax.operators import registry
from autotax.operators.declaration import Operator
from autotax.operators.registry import ONE_OFF, declared

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.core.space import VariantSpace
    from autotax.hardware import Hardware
    from autotax.kernels.context import Context



@dataclass(frozen=True)
class OneOff(Problem):
    """The problem of a one-off. Its sizes are fixed in its functions."""

    dtype: str = dtype()
    world_size: int = ranks()


def declare(
    functions: Mapping[str, Callable[..., Any]], tunables: Mapping[str, Sequence[Value]], name: str | None
) -> type[OneOff]:
    """The problem class of a one-off operator, declared here and in every process that loads its word. Raises UsageError."""
    name = name or _name_of(functions["make"])
    if own := {role: function for role, function in functions.items() if cells.is_of_a_cell(function)}:
        kept = registry.import_file(cells.write(own))
        functions = {role: getattr(kept, function.__name__) if role in own else function for role, function in functions.items()}
    places = {role: _place_of(function, role) for role, function in functions.items()}
    values = {parameter: list(choices) for parameter, choices in tunables.items()}
    declaration = {"name": name, "functions": places, "tunables": values}
    if not values or not all(values.values()):
        raise UsageError("tunables is empty; it must give each parameter at least one value: give some")
    word = ONE_OFF + json.dumps(declaration, sort_keys=True)
    registry.load(word)
    return problem_of(word)


def problem_of(word: str) -> type[OneOff]:
    """The problem class that a word declares."""
    kind: type[OneOff] = getattr(sys.modules[__name__], _class_name(word))
    return kind


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A function that another process can import."""

    file: str
    module: str
    name: str


class _Functions(msgspec.Struct, forbid_unknown_fields=True):
    make: _Place
    inputs: _Place
    reference: _Place
    baseline: _Place


class _Word(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a word."""

    name: Name
    functions: _Functions
    tunables: dict[Name, Annotated[list[Integer | Name], msgspec.Meta(min_length=1)]]


def _read(word: str) -> tuple[_Word, dict[str, _Place]]:
    declaration = from_json(word.removeprefix(ONE_OFF), _Word)
    return declaration, msgspec.structs.asdict(declaration.functions)


def files_of(word: str) -> list[str]:
    """The files of the functions of a word."""
    return list(dict.fromkeys(place.file for place in _read(word)[1].values()))


def load_word(word: str) -> None:
    """Declares the operator of a word. Called by `registry.load`. Raises Malformed, and the errors of an import."""
    declaration, places = _read(word)
    functions = {role: _function_at(place) for role, place in places.items()}
    kind = type(_class_name(word), (OneOff,), {"op": declaration.name, "__module__": __name__})
    setattr(sys.modules[__name__], kind.__name__, kind)  # so that other processes can unpickle its problems
    former = declared.get(declaration.name)
    if former and issubclass(former.problem, OneOff):  # of a former call with other functions or tunables
        del declared[declaration.name]
    operator: Operator[Any] = Operator(kind)
    operator.example(on_gpu=kind(), on_cpu=kind(dtype="fp32"))
    operator.inputs(lambda _, draw: functions["inputs"](draw))
    operator.reference(lambda _, calls, rank: functions["reference"](calls, rank))
    module = functions["make"].__module__
    operator.variant("bsp", _kernel(functions["baseline"], module, takes_params=False), role="baseline")
    operator.variant("tuned", _kernel(functions["make"], module, takes_params=True), _space(declaration.tunables))


def _kernel(function: Callable[..., Any], module: str, *, takes_params: bool) -> type:
    """A kernel class that calls the callable made by a function."""
    from autotax.kernels.kernel import Kernel

    class Made(Kernel[Problem]):
        def __init__(self, problem: Problem, config: Config, context: Context) -> None:
            super().__init__(problem, config, context)
            self.made = function(config.values, context) if takes_params else function(context)

        def __call__(self, *tensors: Any, **_: Any) -> Tensor | None:
            # In a rehearsal, launches through the context only compile. Other work of a function must check `context.dry`.
            self.made(*tensors)
            return None

    Made.__module__ = module  # the digest starts from this module
    return Made


def _space(tunables: Mapping[str, Sequence[Value]]) -> Callable[[Problem, Hardware], VariantSpace]:
    def space(_: Problem, __: Hardware) -> VariantSpace:
        from autotax.core.space import VariantSpace

        first = Config.of("tuned", {name: values[0] for name, values in tunables.items()})
        return VariantSpace("tuned", {name: tuple(values) for name, values in tunables.items()}, (), (first,))

    return space


def _place_of(function: Callable[..., Any], role: str) -> tuple[str, str, str]:
    """The file, the module and the name of a function that another process can import."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if not file or not name.isidentifier() or getattr(module, name, None) is not function:
        raise UsageError(
            f"{role} is {function!r}; ranks import it by name, so it must be a function of a module or script: "
            "move it to the top of one"
        )
    spec = getattr(module, "__spec__", None)
    return str(Path(file).resolve()), spec.name if spec else "", name


def _function_at(place: _Place) -> Callable[..., Any]:
    import importlib.util

    if place.module and place.module != "__main__" and importlib.util.find_spec(place.module):
        loaded = importlib.import_module(place.module)
    else:
        main = sys.modules.get("__main__")
        here = getattr(main, "__file__", None)
        loaded = main if main and here and str(Path(here).resolve()) == place.file else registry.import_file(Path(place.file))
    function: Callable[..., Any] = getattr(loaded, place.name)
    if not callable(function):
        raise TypeError(f"{place.name} of {place.file} is no function")
    return function


def _name_of(function: Callable[..., Any]) -> str:
    file = "notebook" if cells.is_of_a_cell(function) else getattr(sys.modules[function.__module__], "__file__", None)
    file = file or function.__module__
    return re.sub(r"[^a-z0-9]+", "-", f"{Path(file).stem}-{function.__name__}".lower()).strip("-")


def _class_name(word: str) -> str:
    return f"OneOff{hashlib.sha256(word.encode()).hexdigest()[:12]}"
