"""Digests of the code that decides what a variant computes: a winner holds as long as the digest of its variant does.

The digest of a module covers its own code and, for each import of another source, the digest of that source. Sources are the
kernel modules of this package and, for a kernel from outside, the modules of its own top-level package. An import of the rest of
this package counts by the names that it brings, any other import by module and names. So no location of a file of this package
is part of a digest: a module can be moved or renamed, its winners stay.

Files are read as text, because a look-up must not import kernels. Comments, docstrings, blank lines and formatting change
nothing; any other token does. Digests are equal on all versions of Python. `__init__` files of this package are left out; they
compute nothing. What kernels call in the rest of the package (properties of problems, `Config`) is not covered:
`tests/test_what_kernels_take.py` keeps its values.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parent
_KERNELS = f"{_PACKAGE.name}.kernels"
_IMPORTS = (ast.Import, ast.ImportFrom)
_UNUSED = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields of a syntax tree that decide nothing, or that some versions of Python lack."""


@functools.cache
def kernel_digest() -> str:
    """Digest of the text of all kernels: ranks that run the same code have the same."""
    whole = hashlib.sha256()
    for path in sorted((_PACKAGE / "kernels").rglob("*.py")):
        whole.update(path.relative_to(_PACKAGE).as_posix().encode())
        whole.update(_read(path))
    return whole.hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def variant_digest(op: str, variant: str) -> str:
    """Digest of the code that decides what a variant of an operator computes, for instance of `all-gather-gemm`, `push`.

    That of all kernels for an operator or variant that is not here.
    """
    from autotax.operators import registry

    module = registry.module_of(op, variant)
    if module is None or _file_of(module) is None:
        return kernel_digest()
    return module_digest(module)


@functools.lru_cache(maxsize=1024)
def module_digest(module: str) -> str:
    """Digest of the code of a module (`autotax.kernels.flash_decode.bsp`) and of every source that it imports."""
    return _digest(module, module.partition(".")[0], (), {})


def reached_from(module: str) -> list[str]:
    """The sources that the digest of a module covers, itself among them, in alphabetical order."""
    home = module.partition(".")[0]
    reached, queue = {module}, [module]
    while queue:
        new = {name for item in _spelled_module(queue.pop(), home) if (name := item.source)} - reached
        reached |= new
        queue += new
    return sorted(reached)


class _Item(NamedTuple):
    """A piece of a module's spelled code: a text, or the content of a source and the names that are imported from it."""

    text: str
    source: str = ""


def _digest(module: str, home: str, importers: tuple[str, ...], digests: dict[str, str]) -> str:
    """Where modules from outside import each other in a circle, a module among its own importers counts by its place there."""
    if module in importers:
        return f"importer {importers.index(module)}"
    if module not in digests:
        whole = hashlib.sha256()
        for item in _spelled_module(module, home):
            content = _digest(item.source, home, (*importers, module), digests) if item.source else ""
            whole.update(f"{content} {item.text} ".encode())
        digests[module] = whole.hexdigest()[:16]
    return digests[module]


def _is_source(name: str, home: str) -> bool:
    """Whether a module decides what a kernel computes whose top-level package is `home`."""
    ours = name.startswith(f"{_KERNELS}.") or (home != _PACKAGE.name and name.partition(".")[0] == home)
    path = _file_of(name) if ours else None
    return path is not None and not (path.name == "__init__.py" and path.is_relative_to(_PACKAGE))


def _read(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing it where that can be; None if there is none."""
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


@functools.cache
def _spelled_module(module: str, home: str) -> tuple[_Item, ...]:
    """The code of a module so that only what runs matters, the imports at its top in an order that no name of a file changes."""
    path = _file_of(module)
    assert path is not None
    tree = ast.parse(_read(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    spell = functools.partial(_spelled, package=package, home=home)
    imports = [item for node in tree.body if isinstance(node, _IMPORTS) for item in spell(node)]
    tree.body = [node for node in tree.body if not isinstance(node, _IMPORTS)]
    items: list[_Item] = []
    for item in (*sorted(imports), *spell(tree)):
        if items and not item.source and not items[-1].source:
            items[-1] = _Item(f"{items[-1].text} {item.text}")
        else:
            items.append(item)
    return tuple(items)


def _spelled(node: ast.AST, package: str, home: str) -> Iterator[_Item]:
    if isinstance(node, _IMPORTS):
        yield from _spelled_import(node, package, home)
        return
    yield _Item(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in _UNUSED:
            continue
        if name == "body" and isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = [statement for statement in value if not _is_prose(statement)]
        yield _Item(name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _spelled(part, package, home)
            else:
                yield _Item(repr(part))


def _spelled_import(node: ast.Import | ast.ImportFrom, package: str, home: str) -> Iterator[_Item]:
    """What an import brings, an item for each name: from a source, from the rest of this package, or from elsewhere."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            # `import a.b` binds `a`, and the code spells the rest; `import a.b as c` does not.
            base, name, bound = alias.name, "", alias.asname or ""
            source = alias.name
        else:
            base, name, bound = _absolute(node, package), alias.name, alias.asname or alias.name
            source = f"{base}.{name}" if _is_source(f"{base}.{name}", home) else base
        if _is_source(source, home):
            yield _Item(f"import {name if source == base else ''} as {bound}", source)
        elif base.partition(".")[0] == _PACKAGE.name:
            yield _Item(f"import {name} as {bound} from the package")
        else:
            yield _Item(f"import {name} as {bound} from {base}")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The full name of the module that a `from ... import` names, `from . import x` included."""
    base = node.module or ""
    if not node.level:
        return base
    above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
    return f"{above}.{base}" if base else above


def _is_prose(statement: ast.stmt) -> bool:
    """Whether a statement is a string that nobody reads: a docstring, or what describes a constant."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
