"""The lighter interpreter computes the same results, patches Triton once a launch, and leaves an unknown Triton unpatched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from autotax.heap.triton_interpreter import AT_ONCE, PAUSE_S, patch_interpreter
from tests.interpreted import POLLS

ROOT = Path(__file__).parents[2]
PATCHED = [(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "_convert_float")]
PATCHED += [(interpreter.InterpreterBuilder, name) for name in ("create_atomic_rmw", "create_masked_load")]
PATCHED += [(interpreter.interpreter_builder, "options"), (tl.core.block_type, "__init__"), (tl.core.tensor, "__init__")]
PATCHED += [(tl.core, "_unwrap_if_constexpr"), (tl.core.dtype, "__eq__"), (TritonSemantic, "binary_op_type_checking_impl")]


@pytest.mark.volume
def test_computes_the_same_with_less_work() -> None:
    command, interpreting = [sys.executable, "-m", "tests.interpreted"], os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=interpreting, capture_output=True, text=True, check=True)
    report = json.loads(ran.stdout)
    before, first, again = report["results"]
    values = np.arange(8) + 2 * 28 - 7 - 28  # each call of the device function adds 28 and takes the greatest away
    assert before == [*(values * 100_000_000).astype(np.int32).tolist(), *(values * 0.75).astype(np.int64).tolist()]
    assert first == again == before
    usual, *lighter = report["calls"]
    assert max(lighter) <= min(usual, 2), "the kernel's patch serves the functions that it calls"
    assert report["undone"]
    usual, first, again = report["types"]
    assert usual > 2 * first > 0
    assert again == 0, "types are made once"
    assert report["loops"] == 5
    for seconds, gave_up in report["waits"]:
        assert gave_up and seconds > (POLLS - AT_ONCE - 1) * PAUSE_S, "a kernel that polls leaves the core to others"


def _types() -> Iterator[Any]:
    pointers = (tl.pointer_type(tl.int32), tl.pointer_type(tl.int32, 3), tl.pointer_type(tl.int32, const=True))
    for element in (tl.int32, *pointers):
        yield element
        for shape in ([8], [4, 2], [tl.constexpr(4), 2], tl.tuple([2, 4])):
            yield tl.block_type(element, shape)


def _parts() -> list[Any]:
    """All properties of tensors of some types."""
    types = list(_types())
    tensors = [tl.tensor(number, kind) for number, kind in enumerate(types)]
    shapes = [([size.value for size in tensor.shape], tensor.numel.value) for tensor in tensors]
    elements = [(str(tensor.dtype), getattr(tensor.dtype, "address_space", None), tensor.dtype.is_ptr()) for tensor in tensors]
    names = [(tensor.handle, str(tensor.type), tensor.type.is_block(), tensor.type.mangle()) for tensor in tensors]
    return [shapes, elements, names, [first == second for first in types for second in types]]


def test_what_tensors_share_is_what_each_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in PATCHED:
        monkeypatch.setattr(where, name, getattr(where, name))  # to be undone
    before, make = _parts(), tl.core.block_type.__init__
    patch_interpreter.__wrapped__()
    assert tl.core.block_type.__init__ is not make
    assert _parts() == _parts() == before
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])


def _operands() -> list[Any]:
    """Operands: extreme numbers of each type, and tensors of one element, of several elements and of addresses."""
    kinds = [(tl.int1, bool), (tl.int32, np.int32), (tl.uint32, np.uint32), (tl.int64, np.int64), (tl.float16, np.float16)]
    kinds += [(tl.float32, np.float32), (tl.pointer_type(tl.int32), np.uint64), (tl.pointer_type(tl.float32), np.uint64)]
    made: list[Any] = [True, 0, 3, -1, 2.5, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**64]
    for kind, of_numpy in kinds:
        for sizes in ([], [2, 2], [2, 1]):
            values = np.ones(sizes or [1], dtype=of_numpy)
            made += [tl.tensor(interpreter.TensorHandle(values, kind), tl.block_type(kind, sizes) if sizes else kind)]
    return made


def _outcome(check: Callable[..., Any], *arguments: Any) -> list[Any]:
    try:
        return [(str(tensor.type), str(tensor.dtype), tensor.handle.data.tolist()) for tensor in check(*arguments)]
    except Exception as error:
        return [type(error).__name__, str(error)]


@pytest.mark.parametrize("flags", [(), (True, True), (False, False, True, True), (False, False, False, True)], ids=str)
def test_operands_become_what_they_would_have_become(flags: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in PATCHED:
        monkeypatch.setattr(where, name, getattr(where, name))  # to be undone
    check = TritonSemantic.binary_op_type_checking_impl
    patch_interpreter.__wrapped__()
    lighter, semantic, operands = TritonSemantic.binary_op_type_checking_impl, interpreter.interpreter_semantic, _operands()
    assert lighter is not check
    for first in operands:
        for second in operands:
            if isinstance(first, tl.tensor) or isinstance(second, tl.tensor):
                assert _outcome(lighter, semantic, first, second, *flags) == _outcome(check, semantic, first, second, *flags)


@pytest.mark.parametrize("more", [{"more": 1}, None])
def test_leaves_alone_what_it_does_not_know(more: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with further attributes, or made in another way, stay unpatched."""
    for of_tensors in (tl.core.block_type, tl.core.tensor):
        monkeypatch.setattr(of_tensors, "__init__", _otherwise(of_tensors.__init__, more))
    makes = [tl.core.block_type.__init__, tl.core.tensor.__init__]
    for name in ("interpreter_builder", "InterpreterBuilder", "_patch_lang", "_get_np_dtype"):
        monkeypatch.delattr(interpreter, name)
    patch_interpreter.__wrapped__()
    assert not hasattr(interpreter, "_patch_lang")
    assert [tl.core.block_type.__init__, tl.core.tensor.__init__] == makes


def _otherwise(make: Callable[..., None], more: dict[str, int] | None) -> Callable[..., None]:
    """Simulates a later Triton with changed tensors."""

    def make_more(self: Any, *what: Any) -> None:
        if more is None:
            raise TypeError("missing 1 required argument")
        make(self, *what)
        vars(self).update(more)

    return make_more


def test_numbers_become_bf16_and_back_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in PATCHED:
        monkeypatch.setattr(where, name, getattr(where, name))  # to be undone
    convert = vars(interpreter)["_convert_float"]
    patch_interpreter.__wrapped__()
    by_bits, rounded = vars(interpreter)["_convert_float"], ir.ROUNDING_MODE.RTNE
    assert by_bits is not convert
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    numbers = np.concatenate([bits, np.arange(1 << 16, dtype=np.uint32) << 16]).view(np.float32).reshape(2, -1)
    numbers[np.abs(numbers) < 1e-37] = 0.0  # those below the smallest normal number came out wrong
    for rounding in (None, rounded):
        narrow = by_bits(numbers, tl.float32, tl.bfloat16, rounding)
        assert narrow.dtype == np.uint16 and np.array_equal(narrow, convert(numbers, tl.float32, tl.bfloat16, rounding))
        wide = by_bits(narrow, tl.bfloat16, tl.float32, rounding)
        assert wide.dtype == np.uint32 and np.array_equal(wide, convert(narrow, tl.bfloat16, tl.float32, rounding))
    tiny = torch.tensor([1e-39, -2e-40, 1e-45]).bfloat16()
    wide = by_bits(tiny.view(torch.uint16).numpy(), tl.bfloat16, tl.float32, None)
    assert np.array_equal(wide.view(np.float32), tiny.float().numpy())


def test_a_row_of_a_product_has_the_same_bits_in_every_place() -> None:
    patch_interpreter()
    drawn = np.random.default_rng(0)
    x, y, added = (drawn.standard_normal(shape).astype(np.float32) for shape in ((64, 40), (40, 24), (64, 24)))

    def multiplied(places: np.ndarray) -> np.ndarray:
        handles = (interpreter.TensorHandle(values, tl.float32) for values in (x[places], y, added[places]))
        product: np.ndarray = interpreter.interpreter_builder.create_dot(*handles, None, 0).data
        assert product.dtype == np.float32
        return product

    whole = multiplied(np.arange(64))
    np.testing.assert_allclose(whole, x.astype(np.float64) @ y + added, rtol=1e-6, atol=1e-6)
    for places in (np.arange(8, 16), np.arange(64)[::-1], np.array([9])):
        assert np.array_equal(multiplied(places), whole[places])
