"""Digests of a variant's code: a winner holds as long as the digest of its variant does not change.

A digest is one of definitions, not of files. The digest of a function, class or constant covers its own code and, for each name
in it that is defined in a source, the digest of that definition. Sources are the kernel modules of this package and, for a kernel
from another package, the modules of its top-level package. A name from the rest of this package counts by the name alone, a name
from elsewhere by its name and its module. So definitions and modules can be moved and modules renamed, and winners stay.

Files are read as text, because a look-up must not import kernels. Comments, docstrings, blank lines and formatting change
nothing; any other token of a definition does. Digests are equal on all versions of Python. `__init__` files of this package are
left out; they compute nothing. Code in the rest of the package that kernels call (properties of problems, `Config`) is not
covered. `tests/test_what_kernels_take.py` checks its values.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parent
_KERNELS = f"{_PACKAGE.name}.kernels"
_UNUSED = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}
"""Fields of a syntax tree without influence on the code, or that some versions of Python lack."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Symbol(NamedTuple):
    """A name at the top of a module; the module as a whole where `name` is empty."""

    module: str
    name: str = ""


class _Item(NamedTuple):
    """A piece of spelled code: a text, and the symbol to which a name in it refers, if that is a symbol of a source."""

    text: str
    symbol: Symbol | None = None


@functools.cache
def kernel_digest() -> str:
    """Digest of the text of all kernels: ranks that run the same code have the same."""
    whole = hashlib.sha256()
    for path in sorted((_PACKAGE / "kernels").rglob("*.py")):
        whole.update(path.relative_to(_PACKAGE).as_posix().encode())
        whole.update(_read(path))
    return whole.hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def symbol_digest(symbol: Symbol) -> str:
    """Digest of a definition (`autotax.kernels.flash_decode.bsp`, `Bsp`) and of every definition that it refers to."""
    return _digest(symbol, symbol.module.partition(".")[0], (), {})


def reached_from(symbol: Symbol) -> list[Symbol]:
    """The definitions that the digest of a symbol covers, itself among them, in alphabetical order."""
    home = symbol.module.partition(".")[0]
    reached, queue = {symbol}, [symbol]
    while queue:
        new = {item.symbol for item in _spelled_symbol(queue.pop(), home) if item.symbol} - reached
        reached |= new
        queue += new
    return sorted(reached)


def _digest(symbol: Symbol, home: str, users: tuple[Symbol, ...], digests: dict[Symbol, str]) -> str:
    """The digest of a symbol. A symbol that uses itself, like a recursive function, counts by the number of steps to its earlier
    occurrence.
    """
    if symbol in users:
        return f"user {len(users) - users.index(symbol)}"
    if symbol not in digests:
        whole = hashlib.sha256()
        for item in _spelled_symbol(symbol, home):
            content = _digest(item.symbol, home, (*users, symbol), digests) if item.symbol else ""
            whole.update(f"{content} {item.text} ".encode())
        digests[symbol] = whole.hexdigest()[:16]
    return digests[symbol]


# Modules as their definitions


@dataclass
class _Source:
    """A module's top level: the statements that bind each name, and the statements that bind none but run with any of them."""

    module: str
    home: str
    package: str
    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    loose: list[ast.stmt] = field(default_factory=list)
    """`from ... import *` is among these."""
    imported: dict[str, _Item] = field(default_factory=dict)
    """Imports at the top of the module, by local name."""
    modules: dict[str, str] = field(default_factory=dict)
    """Sources that are imported as modules at the top, by local name."""


@functools.cache
def _source(module: str, home: str) -> _Source:
    path = _file_of(module)
    assert path is not None
    source = _Source(module, home, package=module if path.name == "__init__.py" else module.rpartition(".")[0])
    for statement in ast.parse(_read(path)).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            if statement.names[0].name == "*":
                source.loose.append(statement)
                continue
            for alias in statement.names:
                name = alias.asname or alias.name.partition(".")[0]
                source.imported[name] = item = _imported(statement, alias, source)
                if item.symbol and not item.symbol.name:
                    source.modules[name] = item.symbol.module
        elif names := _bound_names(statement):
            for name in names:
                source.bound.setdefault(name, []).append(statement)
        elif not _is_prose(statement):
            source.loose.append(statement)
    return source


def _bound_names(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module binds there."""
    if isinstance(statement, _SCOPES):
        return {statement.name}
    names: set[str] = set()
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in child.names}
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            names |= _bound_names(child)  # type: ignore[arg-type]
        else:
            names |= {node.id for node in ast.walk(child) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names


def _imported(node: ast.Import | ast.ImportFrom, alias: ast.alias, source: _Source) -> _Item:
    """The target of an imported name: a symbol of a source, a name of the rest of this package, or a name from elsewhere."""
    if isinstance(node, ast.Import):
        base, name = alias.name, ""
    else:
        base, name = _absolute(node, source.package), alias.name
        if _is_source(f"{base}.{name}", source.home):
            base, name = f"{base}.{name}", ""
    if _is_source(base, source.home):
        whole = isinstance(node, ast.Import) and not alias.asname  # `import a.b` binds `a`; its attributes are not followed
        return _Item("import", Symbol(base, "" if name == "*" or whole else name))
    if base.partition(".")[0] == _PACKAGE.name:
        return _Item(f"import {name} of the package")
    return _Item(f"import {base} {name}")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The full name of the module that a `from ... import` names, `from . import x` included."""
    base = node.module or ""
    if not node.level:
        return base
    above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
    return f"{above}.{base}" if base else above


# Code, spelled so that only executed code matters


@functools.cache
def _spelled_symbol(symbol: Symbol, home: str) -> tuple[_Item, ...]:
    source = _source(symbol.module, home)
    spelled: list[_Item] = []
    if symbol.name in source.imported:
        spelled.append(source.imported[symbol.name])
    elif symbol.name in source.bound:
        for statement in source.bound[symbol.name]:
            _spell(statement, source, spelled)
    else:  # the whole module, or a name that is bound in a way not seen here
        spelled += [_Item(name, Symbol(symbol.module, name)) for name in sorted({*source.bound, *source.imported})]
    for statement in source.loose:
        _spell(statement, source, spelled)
    items: list[_Item] = []
    texts: list[str] = []
    for item in spelled:
        texts.append(item.text)
        if item.symbol:
            items.append(_Item(" ".join(texts), item.symbol))
            texts.clear()
    return (*items, _Item(" ".join(texts)))


def _spell(node: ast.AST, source: _Source, spelled: list[_Item], local: frozenset[str] = frozenset()) -> None:
    """Appends the code of a node, with the symbols to which its names refer. `local` are the names of the functions around it."""
    if isinstance(node, ast.Name):
        spelled.append(_Item(node.id) if node.id in local else _reference(node.id, source))
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            spelled.append(_imported(node, alias, source)._replace(text=f"{alias.name} {alias.asname}"))
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in source.modules.keys() - local:
        spelled.append(_Item(node.attr, Symbol(source.modules[node.value.id], node.attr)))
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in source.bound:
        spelled.append(_Item(repr(node.value), Symbol(source.module, node.value)))  # `globals()[...]`, `getattr(module, ...)`
        return
    spelled.append(_Item(type(node).__name__))
    inner = local | _local_names(node) if isinstance(node, _FUNCTIONS) else local
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in _UNUSED:
            continue
        if name == "body" and isinstance(node, _SCOPES):
            value = [statement for statement in value if not _is_prose(statement)]
        spelled.append(_Item(name))
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                _spell(part, source, spelled, inner if name == "body" else local)
            else:
                spelled.append(_Item(repr(part)))


def _local_names(function: ast.AST) -> frozenset[str]:
    """The names that a function binds: its arguments, and assigned names that are not declared global."""
    names: set[str] = set()
    outer: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Global):
            outer |= {*node.names}
    return frozenset(names - outer)


def _reference(name: str, source: _Source) -> _Item:
    """The item for a name in code. The local name and the module through which it was imported do not matter."""
    if name in source.bound:
        return _Item(name, Symbol(source.module, name))
    if name in source.imported:
        item = source.imported[name]
        return _Item(item.symbol.name, item.symbol) if item.symbol else _Item(f"{name} {item.text}")
    return _Item(name)


def _is_prose(statement: ast.stmt) -> bool:
    """Whether a statement is a string without effect: a docstring, or the description of a constant."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


# Files


def _is_source(name: str, home: str) -> bool:
    """Whether a module is a source for a kernel whose top-level package is `home`."""
    ours = name.startswith(f"{_KERNELS}.") or (home != _PACKAGE.name and name.partition(".")[0] == home)
    path = _file_of(name) if ours else None
    return path is not None and not (path.name == "__init__.py" and path.is_relative_to(_PACKAGE))


def _read(path: Path) -> bytes:
    return path.read_bytes()


def has_source(module: str) -> bool:
    """Whether the module has a source file that a digest can read."""
    return _file_of(module) is not None


@functools.cache
def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing it if possible; None if there is none."""
    inside = module.split(".")
    if inside[0] == _PACKAGE.name:
        path = _PACKAGE.joinpath(*inside[1:])
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
    if module in sys.modules:
        origin = getattr(sys.modules[module], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None
