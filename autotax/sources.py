"""FROM WHAT a variant is made: the kernel sources that decide what it computes, and their digests.

All is told from the text of the files, for a look-up must not import kernels. A variant's sources are its own module,
`kernels/OPERATOR/VARIANT.py`, and what that reaches by imports among the kernels and the tile orders. The `__init__` of
packages are left out: they import every variant, and all they decide is which class a name stands for.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).parent
_ARITHMETIC = ("order.py", "pieces.py", "shares.py", "sides.py")
"""Of the spaces: what kernels compile too, or their host side runs."""
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+({_PACKAGE.name}[\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|(?:\\\n|[^\n])*)", re.MULTILINE
)
_NAME = re.compile(r"[\w.]+")


@functools.cache
def kernel_digest() -> str:
    """Digest of everything that decides what any config computes: the kernels, their launch code, the tile orders."""
    return _digest(_texts())


@functools.lru_cache(maxsize=1024)
def variant_digest(op: str, variant: str) -> str:
    """Digest of the sources that decide what a variant of an operator computes, for instance of `all-gather-gemm`, `push`.

    That of all sources where the variant has no module of its own, as plugins and peers have none.
    """
    module = f"kernels/{op.replace('-', '_')}/{variant}.py"
    return _digest(reached_from(module)) if module in _modules().values() else kernel_digest()


def reached_from(module: str) -> list[str]:
    """The sources that a module (`kernels/flash_decode/bsp.py`) is made of, itself among them, always in the same order."""
    found, coming = {module}, [module]
    while coming:
        new = _imports(coming.pop()) - found
        found |= new
        coming += new
    return [path for path in _texts() if path in found]


@functools.cache
def _texts() -> dict[str, bytes]:
    """All sources, by their path in the package. Read once: digests that are asked for later are of the same moment."""
    paths = [*sorted((_PACKAGE / "kernels").rglob("*.py")), *(_PACKAGE / "spaces" / name for name in _ARITHMETIC)]
    return {path.relative_to(_PACKAGE).as_posix(): path.read_bytes() for path in paths}


@functools.cache
def _modules() -> dict[str, str]:
    """The path of each source that is no package, by the name under which it is imported."""
    paths = [path for path in _texts() if not path.endswith("/__init__.py")]
    return {f"{_PACKAGE.name}.{path.removesuffix('.py').replace('/', '.')}": path for path in paths}


@functools.cache
def _imports(module: str) -> set[str]:
    """Those of our sources that the text of one imports, anywhere in it."""
    names: set[str] = set()
    for package, what in _IMPORT.findall(_texts()[module].decode()):
        imported = _NAME.findall(what)
        names |= {package, *(f"{package}.{name}" for name in imported)} if package else set(imported)
    return {_modules()[name] for name in names if name in _modules()}


def _digest(paths: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.encode())
        whole.update(_texts()[path])
    return whole.hexdigest()[:16]
