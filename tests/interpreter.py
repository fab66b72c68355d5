"""The Triton interpreter at twice its speed, in ranks of tests."""

from __future__ import annotations

import inspect
from typing import Any

BUILTINS: dict[Any, list[str]] = {}


def hasten() -> None:
    """At every call of a device function the interpreter looks through all of triton.language for what to replace, which
    takes half of its time. That stays the same, so here it is remembered. A Triton that does it in another way is left alone.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_builtin") or not hasattr(interpreter, "_patch_attr"):
        return
    is_builtin, patch = interpreter.tl.core.is_builtin, interpreter._patch_attr

    def patch_builtin(package: Any, *how: Any) -> None:
        if package not in BUILTINS:
            BUILTINS[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in BUILTINS[package]:
            member = getattr(package, name)
            if is_builtin(member):  # else it is replaced already
                patch(package, name, member, *how)

    interpreter._patch_builtin = patch_builtin
