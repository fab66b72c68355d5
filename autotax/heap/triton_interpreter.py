"""Patches of Triton's interpreter: loops that NumPy would refuse, and less useless work.

Triton 3.6 converts a whole array to a number for loop bounds and indices, which NumPy refuses from version 2.4 on. The result of
a comparison keeps the type of its operands, so a comparison of scalars becomes a block of 32 bits, which Triton 3.9 refuses as a
mask. A product in float32 rounds a row by its place in the tile, as NumPy's library has it on some processors. On a GPU a row has
the same bits in every place. So products are computed in float64 and rounded once.

The patches avoid five kinds of work, which more than halves the time of kernels on CPU ranks:

- Each call of a device function searches `triton.language` for functions to replace. The call of the kernel has done so already.
- Each sum of integers is repeated in 64 bits for an assertion on overflow. The interpreter drops it outside debug mode.
- Each operation builds the table of NumPy's types again, and the names of its result's type and shape.
- Each conversion between bf16 and float32 takes numbers apart and puts them together again: some thirty operations of NumPy where
  a shift by 16 bits has the same result. Numbers below the smallest normal one came out wrong.
- Each operation looks for a common type of its operands even if their types are equal, and unwraps arguments that are no
  constants.

All other results of kernels, and the checks, stay the same.

A polling kernel pauses between its polls, so that the peer it waits for gets the core: there may be more ranks than cores.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from inspect import ismodule
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

AT_ONCE, PAUSE_S = 64, 2e-4
"""Polls of a word without a pause, 37 us each on a fast core, and the pause before each further one."""
CPU_POLLS_PER_S = 3400
"""Most polls per second once a kernel pauses."""
CPU_POLL_LIMIT = 20 * CPU_POLLS_PER_S
"""Polls before a wait of a CPU rank gives up: after 20 seconds or more. Its peer may share a core with many others."""


@functools.cache
def patch_interpreter() -> None:
    """Applies the patches, before the first kernel of a process. Code of Triton that they do not know stays unpatched."""
    options: Any = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once(interpreter._patch_lang, interpreter._LangPatchScope)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if triton.__version__.startswith("3.6."):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    if _parts(tl.core.block_type, tl.int32, [1]) == {"element_ty", "shape", "numel", "name"}:
        tl.core.block_type.__init__ = _by_shape(tl.core.block_type.__init__)
    if _parts(tl.core.tensor, None, tl.int32) == {"handle", "shape", "numel", "type", "dtype"}:
        tl.core.tensor.__init__ = _with_shapes(tl.core.tensor.__init__)
    if hasattr(tl.core, "_unwrap_if_constexpr"):
        tl.core._unwrap_if_constexpr = _seldom(tl.core._unwrap_if_constexpr)
    equal = tl.core.dtype.__eq__
    tl.core.dtype.__eq__ = lambda self, other: self is other or bool(equal(self, other))
    builder: Any = getattr(interpreter, "InterpreterBuilder", None)
    pauses = _Pauses()
    for name, position in (("create_atomic_rmw", 1), ("create_masked_load", 0)):
        if hasattr(builder, name):
            setattr(builder, name, pauses.before(getattr(builder, name), position))
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = _by_bits(interpreter._convert_float)
    if hasattr(builder, "create_dot"):
        builder.create_dot = _rounded_once(builder.create_dot)
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, _boolean(getattr(builder, name)))
    semantic: Any = type(getattr(interpreter, "interpreter_semantic", None))
    if hasattr(semantic, "binary_op_type_checking_impl"):
        semantic.binary_op_type_checking_impl = _unless_alike(semantic.binary_op_type_checking_impl)


def _rounded_once(multiply: Any) -> Any:
    """Calls `multiply(builder, one matrix, the other, addend, ...)` with a float32 addend in float64, and rounds the sum."""

    def multiply_wide(builder: Any, one: Any, other: Any, addend: Any, *more: Any) -> Any:
        if addend.data.dtype != np.float32:
            return multiply(builder, one, other, addend, *more)
        wide = interpreter.TensorHandle(addend.data.astype(np.float64), tl.float64)
        product = multiply(builder, one, other, wide, *more)
        return interpreter.TensorHandle(product.data.astype(np.float32), addend.dtype.scalar)

    return multiply_wide


def _by_bits(convert: Any) -> Any:
    """Calls `convert(numbers, their type, another type, rounding)` unless the types are bf16 and fp32. Both return bits."""
    shift = np.uint32(16)

    def convert_others(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name == "bf16" and target.name == "fp32":
            return numbers.view(np.uint16).astype(np.uint32) << shift
        if rounding is None and source.name == "fp32" and target.name == "bf16":
            return (numbers.view(np.uint32) >> shift).astype(np.uint16)
        return convert(numbers, source, target, rounding)

    return convert_others


def _boolean(compare: Any) -> Any:
    """Calls `compare(builder, one operand, the other)`, and gives its result one bit as type."""

    def compare_to_bit(builder: Any, one: Any, other: Any) -> Any:
        result = compare(builder, one, other)
        result.dtype = tl.int1
        return result

    return compare_to_bit


class _Pauses:
    """Pauses between polls. A program that reads only the same words again and again waits for another rank."""

    def __init__(self) -> None:
        self._words = (0, 0)
        self._times = 0

    def before(self, read: Any, position: int) -> Any:
        """Wraps `read(builder, ...)`, which has its pointers in the argument at this position."""

        def read_politely(builder: Any, *arguments: Any, **keywords: Any) -> Any:
            pointers = arguments[position].data
            words = (pointers.size, pointers.item(0))
            if words != self._words:
                self._words, self._times = words, 0
            elif self._times < AT_ONCE:
                self._times += 1
            else:
                time.sleep(PAUSE_S)
            return read(builder, *arguments, **keywords)

        return read_politely


def _parts(kind: Any, *arguments: Any) -> set[str]:
    """The names of an object's attributes; empty if the object does not have the expected form."""
    try:
        return set(vars(kind(*arguments)))
    except (AttributeError, TypeError):
        return set()


def _once(patch: Any, unchanged: Any) -> Any:
    """Makes `patch` skip functions whose modules are patched already. `patch(function)` and `unchanged()` return an undo."""

    @functools.cache
    def used(function: Any) -> tuple[ModuleType, ...]:
        return tuple(value for value in function.__globals__.values() if ismodule(value) and value in (tl, tl.core))

    def patch_once(function: Any) -> Any:
        # The interpreter's replacement of a builtin is no builtin, so a builtin means an unpatched module.
        return patch(function) if any(tl.core.is_builtin(module.load) for module in used(function)) else unchanged()

    return patch_once


def _with_index(patch: Any) -> Any:
    """Calls `patch(tensors, scope)`, and makes a tensor of one element of any shape usable as a number."""

    def patch_index(tensors: Any, scope: Any) -> None:
        patch(tensors, scope)
        scope.set_attr(tensors, "__index__", lambda tensor: int(tensor.handle.data.item()))

    return patch_index


def _by_name(numpy_type: Any) -> Any:
    """Caches `numpy_type(type)` by the name of the element type, on which alone the result depends."""
    cache: dict[str, Any] = {}

    def numpy_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in cache:
            cache[name] = numpy_type(kind)
        return cache[name]

    return numpy_type_of


def _by_shape(make: Any) -> Any:
    """Caches `make(type of blocks, type of elements, shape)` by the shape and the name of the element type."""
    cache: dict[Any, dict[str, Any]] = {}

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in cache:
            make(self, element_ty, shape)
            cache[key] = vars(self).copy()
        vars(self).update(cache[key], element_ty=element_ty)

    return make_once


def _with_shapes(make: Any) -> Any:
    """Like `make(tensor, handle, type)`, but tensors of one shape share the shape object."""
    cache: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_with(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in cache:
            make(self, handle, type)
            cache[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = cache[sizes]

    return make_with


def _seldom(unwrap: Any) -> Any:
    """Calls `unwrap(argument)` only for arguments that may hold constants of the compiler."""
    constant, plain = tl.core.constexpr, {int, float, bool, str, type(None), tl.core.tensor, tl.core.dtype}

    def unwrap_others(argument: Any) -> Any:
        kind = type(argument)
        return argument.value if kind is constant else argument if kind in plain else unwrap(argument)

    return unwrap_others


def _unless_alike(check: Any) -> Any:
    """Calls `check(semantic, one operand, the other, ...)` unless types and shapes are equal, or a number fits the type."""

    def fits(tensor: Any, number: Any) -> bool:
        if type(number) is not int or type(tensor) is not tl.core.tensor:
            return False
        most = 1 << 31 if tensor.dtype is tl.int32 else 1 << 63 if tensor.dtype is tl.int64 else 0
        return -most <= number < most

    def check_others(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, *more: bool, **keywords: bool
    ) -> Any:
        if not more and not keywords:  # quotients have other rules
            if type(lhs) is type(rhs) is tl.core.tensor:
                # Tensors of one shape share the shape object. Pointers have another class.
                if lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and type(lhs.dtype) is tl.core.dtype:
                    return lhs, rhs
            elif fits(lhs, rhs):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
            elif fits(rhs, lhs):
                return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, *more, **keywords)

    return check_others
