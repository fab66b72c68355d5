"""FROM WHAT a variant is made: the sources that decide what it computes, and their digests.

A variant's sources are the module of its kernel and what that reaches by imports: among the kernels of this package, and for a
kernel from outside in its own top-level package too. Sources are read as text, for a look-up must not import kernels. The digest
is one of code: comments, docstrings, blank lines and formatting do not change it, any token that runs does. It is equal on all
versions of Python. `__init__` files of this package are left out; they decide nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parent
_KERNELS = f"{_PACKAGE.name}.kernels"
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
    whole = hashlib.sha256()
    for name in reached_from(module):
        whole.update(name.encode())
        whole.update(_code_of(name).encode())
    return whole.hexdigest()[:16]


def reached_from(module: str) -> list[str]:
    """The modules that a module (`autotax.kernels.flash_decode.bsp`) is made of, itself among them, in alphabetical order."""
    home = module.partition(".")[0]
    found, coming = {module}, [module]
    while coming:
        new = {name for name in _imports(coming.pop()) if _is_source(name, home)} - found
        found |= new
        coming += new
    return sorted(found)


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
def _tree(module: str) -> ast.Module:
    path = _file_of(module)
    assert path is not None
    return ast.parse(_read(path))


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """The names of modules that a module may import anywhere in it; some of them are names of functions and classes."""
    names: set[str] = set()
    path = _file_of(module)
    package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{above}.{base}" if base else above
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@functools.cache
def _code_of(module: str) -> str:
    """The code of a module, spelled so that only what runs matters."""
    return " ".join(_spelled(_tree(module)))


def _spelled(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in _UNUSED:
            continue
        if name == "body" and isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = [each for each in value if not _is_prose(each)]
        yield name
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _spelled(each)
            else:
                yield repr(each)


def _is_prose(statement: ast.stmt) -> bool:
    """Whether a statement is a string that nobody reads: a docstring, or what describes a constant."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
