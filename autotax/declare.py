"""One-off operators, which `autotax.tune_callable` makes from functions.

Ranks and compilers receive a one-off as one word: `callable:` and JSON with the places of its functions and its tunables. Loading
that word declares the same operator in their process.

Ranks and compilers are other processes. They cannot import a cell of a notebook, but they can import a file with the source of
its functions, and with the imports, constants and functions that these refer to.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import linecache
import os
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from platformdirs import user_cache_path

from autotax.core.config import Config, Value
from autotax.core.decoding import Integer, Name, from_json
from autotax.core.errors import UsageError
from autotax.core.files import write_whole
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
    if own := {role: function for role, function in functions.items() if is_of_a_cell(function)}:
        kept = registry.import_file(write_cells(own))
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
    file = "notebook" if is_of_a_cell(function) else getattr(sys.modules[function.__module__], "__file__", None)
    file = file or function.__module__
    return re.sub(r"[^a-z0-9]+", "-", f"{Path(file).stem}-{function.__name__}".lower()).strip("-")


def _class_name(word: str) -> str:
    return f"OneOff{hashlib.sha256(word.encode()).hexdigest()[:12]}"


# Functions of notebook cells.

NOTEBOOK = "__main__"
HEAD = '"""Functions of a notebook, written by autotax for its ranks. Do not edit: a change of the cells makes a new file."""\n'


def is_of_a_cell(function: Callable[..., Any]) -> bool:
    """Whether a function was defined in a cell or at a prompt."""
    module = sys.modules.get(NOTEBOOK)
    return getattr(function, "__module__", None) == NOTEBOOK and getattr(module, "__file__", None) is None


def write_cells(functions: Mapping[str, Callable[..., Any]]) -> Path:
    """Writes a file with these functions and returns its path; equal sources have the same path. `functions` has their roles as
    keys, for messages. Raises UsageError for a function without a name or a source, and for a value that has no text.
    """
    cells = _Cells(vars(sys.modules[NOTEBOOK]))
    for role, function in functions.items():
        name = function.__name__
        if cells.names.get(name) is not function:
            raise UsageError(
                f"{role} is {function!r}; ranks import it by name, so it must be a function of a cell: give it a name there"
            )
        cells.add(name, role)
    text = "\n".join([HEAD, *cells.texts.values()])
    folder = user_cache_path("autotax") / "cells"
    path = folder / f"cells_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = place.stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o002:
            raise UsageError(f"folder {place} is another user's, or all users may write to it: remove it, or `chmod o-w` it")
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
    return path


class _Cells:
    """Collects the definitions of names, each behind the names that it refers to."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.texts: dict[str, str] = {}
        self._seen: set[str] = set()

    def add(self, name: str, user: str) -> None:
        """Adds a name of the notebook, unless it is a built-in one. `user` refers to it."""
        if name in self._seen or name not in self.names:
            return
        self._seen.add(name)
        value = self.names[name]
        self.texts[name] = self._defined(name, value) if _of_a_cell(value) else _stated(name, value, user)

    def _defined(self, name: str, value: Any) -> str:
        plain = _plain(value)
        text = _source(plain)
        if not text:
            raise UsageError(f"{name} has no source that Python can find: define it in a cell")
        if plain.__name__ != name:
            text += f"\n{name} = {plain.__name__}\n"
        if getattr(plain, "__closure__", None):
            raise UsageError(f"{name} refers to variables of another function: define it at the top of a cell")
        for other in sorted(_globals_of(text)):
            self.add(other, name)
        return f"\n{text}"


def _plain(value: Any) -> Any:
    """The function inside of what a decorator made, or a class."""
    inner = getattr(value, "fn", value)  # of triton.jit
    return inspect.unwrap(inner) if callable(inner) else inner


def _source(plain: Any) -> str:
    """The source of a function or class; empty if there is none. `inspect` finds no classes of modules without a file."""
    if not isinstance(plain, type):
        with suppress(OSError, TypeError, SyntaxError):
            text = textwrap.dedent(inspect.getsource(plain))
            # From Python 3.13 on code of `exec` has the lines of `python -c`, which do not define it.
            if plain.__code__.co_name in {"<lambda>", *(getattr(node, "name", "") for node in ast.parse(text).body)}:
                return text
        return ""
    for file, entry in reversed(list(linecache.cache.items())):
        if len(entry) < 3 or Path(file).exists():  # a cell has lines, and no file
            continue
        with suppress(SyntaxError):  # of a cell with magics
            for node in ast.parse("".join(lines := entry[2])).body:
                if isinstance(node, ast.ClassDef) and node.name == plain.__name__:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _of_a_cell(value: Any) -> bool:
    plain = _plain(value)
    return isinstance(plain, FunctionType | type) and plain.__module__ == NOTEBOOK


def _globals_of(text: str) -> set[str]:
    """The global names that a definition refers to."""
    top = symtable.symtable(text, "cell", "exec")
    tables, names = [top], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return names


def _stated(name: str, value: Any, user: str) -> str:
    """A line that gives a name its value in another process."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    for own in (getattr(value, "__qualname__", None), name):
        if module and module.__name__ != NOTEBOOK and own and getattr(module, own, None) is value:
            return f"from {module.__name__} import {own} as {name}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "torch.dtype":
        return f"import torch\n{name} = {value!r}"
    if kind == "triton.language.core.constexpr":
        return f"import triton.language\n{name} = triton.language.constexpr({value.value!r})"
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    raise UsageError(
        f"{user} refers to {name}, a {type(value).__qualname__}; allowed are modules, functions, classes, numbers, texts and "
        f"collections of them: make it inside of {user}"
    )
