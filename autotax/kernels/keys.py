"""The same keys in Triton's cache for every process, whatever it compiled before.

Triton hashes a function when it is first needed, and takes over the global constants of the functions it calls only if those
have been hashed already: the key of a kernel depends on which kernels came before it. Hashing all functions once, in one order,
before anything is compiled makes keys agree, so that ranks find what compilers left for them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

import triton
from triton.runtime.jit import JITFunction

import autotax.kernels


@functools.cache
def fix_cache_keys() -> None:
    """Hashes every device function of this package. Call it before the first compilation of a process; where kernels are
    interpreted it imports them and does no more.
    """
    package = autotax.kernels
    for info in sorted(pkgutil.walk_packages(package.__path__, package.__name__ + "."), key=lambda info: info.name):
        for value in vars(importlib.import_module(info.name)).values():
            # Interpreted, kernels call plain functions, which have no hash; those in Gluon, which are not, cannot be used then.
            if isinstance(value, JITFunction) and not triton.knobs.runtime.interpret:
                _ = value.cache_key
