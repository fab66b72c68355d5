"""Checks of torch's operators after `install`: functions that run on all ranks."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import autotax.torch
from autotax.core.errors import UsageError
from autotax.db.lookup import MISSES_VARIABLE, save_at_exit
from autotax.heap.world import World
from autotax.operators.verification import relative_error
from autotax.torch import plans, symm_mem
from autotax.torch.context_parallel import FUNCTION
from autotax.torch.plans import Status

OPS = torch.ops.symm_mem
Operands = tuple[tuple[int, ...], Sequence[tuple[int, str]], int]
"""A's shard, the columns and layouts of Bs, and the dimension that is gathered or scattered."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def generator(seed: int) -> torch.Generator:
    """On the default device, where tensors are made."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def laid_out(k: int, n: int, layout: str, seed: int) -> Tensor:
    """B [k, n]: `nk` as W.t(), `kn` row-major, `no` as a slice of something wider."""
    if layout == "nk":
        return normal(n, k, seed=seed).t()
    return normal(k, n, seed=seed) if layout == "kn" else normal(k, 2 * n, seed=seed)[:, ::2]


def group() -> str:
    return str(dist.group.WORLD.group_name)


def same(ours: Tensor, theirs: Tensor) -> None:
    """Checks that a result has the values and the layout of torch's."""
    assert ours.shape == theirs.shape
    assert ours.stride() == theirs.stride(), (ours.stride(), theirs.stride())
    assert relative_error(ours.contiguous(), theirs.contiguous()) <= 1e-5


def gather_like_torch(world: World, db: str, calls: Sequence[Operands], return_a: bool) -> Status:
    """Compares calls of the gathering operator, twice each, with torch's own; the status afterwards."""
    autotax.torch.install(db)
    for turn in range(2):
        for number, (shape, columns, dim) in enumerate(calls):
            a = normal(*shape, seed=10 * number + world.rank + turn)
            k = shape[-1] * (world.size if dim == len(shape) - 1 else 1)
            bs = [laid_out(k, n, layout, 100 + number + world.rank) for n, layout in columns]
            whole, results = OPS.fused_all_gather_matmul(a, bs, dim, group(), return_A=return_a)
            right, expected = symm_mem.torch_all_gather_matmul(a, bs, dim, group())
            assert (whole is None) == (not return_a)
            if return_a:
                same(whole, right)
            for ours, theirs in zip(results, expected, strict=True):
                same(ours, theirs)
    return ended()


def scatter_like_torch(world: World, db: str, calls: Sequence[tuple[tuple[int, ...], int, str, str, int]]) -> Status:
    """Compares calls of the scattering operator, twice each, with torch's own; the status afterwards."""
    autotax.torch.install(db)
    for turn in range(2):
        for number, (shape, n, layout, reduce_op, dim) in enumerate(calls):
            a = normal(*shape, seed=10 * number + world.rank + turn)
            b = laid_out(shape[-1], n, layout, 100 + number + world.rank)
            same(
                OPS.fused_matmul_reduce_scatter(a, b, reduce_op, dim, group()),
                symm_mem.torch_matmul_reduce_scatter(a, b, reduce_op, dim, group()),
            )
    return ended()


def ended() -> Status:
    """Returns the counts of calls, and uninstalls the operators for the next test."""
    status = autotax.torch.status()
    assert not plans.failures()
    autotax.torch.uninstall()
    return status


def with_warnings(work: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught if str(warning.message).startswith("autotax")]


def call(rows: int = 8, k: int = 40, n: int = 24) -> Tensor:
    """Makes and checks one call of the gathering operator. Returns the result."""
    a, b = normal(rows, k, seed=dist.get_rank()), laid_out(k, n, "nk", 7)
    _, (y,) = OPS.fused_all_gather_matmul(a, [b], 0, group(), return_A=False)
    same(y, symm_mem.torch_all_gather_matmul(a, [b], 0, group())[1][0])
    return y


def with_misses(_: World, db: str) -> Status:
    """A program with AUTOTAX_MISSES=1: a call that has a winner, one that has none three times, and its end."""
    autotax.torch.install(db)
    call()
    for _ in range(3):
        call(80)
    status = ended()
    with mock.patch.dict(os.environ, {MISSES_VARIABLE: "1"}):
        save_at_exit()
    return status


def while_captured(_: World, db: str) -> tuple[Status, list[str]]:
    """Two calls while a graph seems to be captured, one that is not, and one that is again."""

    def work() -> None:
        autotax.torch.install(db)
        with mock.patch.object(plans, "capturing", return_value=True):
            call()
            call()
        call()
        with mock.patch.object(plans, "capturing", return_value=True):
            call()

    messages = with_warnings(work)
    return ended(), messages


def parted(world: World, db: str) -> tuple[Status, list[str]]:
    """A first call in which the ranks gather other rows, which torch cannot gather either; then calls that agree."""

    def work() -> None:
        autotax.torch.install(db)
        call()
        a, b = normal(2 + 2 * world.rank, 40, seed=1), laid_out(40, 24, "nk", 7)
        with mock.patch.object(symm_mem, "torch_all_gather_matmul", return_value=(None, [])):
            OPS.fused_all_gather_matmul(a, [b], 0, group())
        call(6)
        call(8)

    messages = with_warnings(work)
    return ended(), messages


def with_databases(world: World, dbs: Sequence[str]) -> tuple[Status, list[str]]:
    """A call where each rank has a database of its own."""

    def work() -> None:
        autotax.torch.install(dbs[world.rank])
        call()

    messages = with_warnings(work)
    return ended(), messages


def from_two_threads(_: World, db: str) -> tuple[list[str], Status]:
    """Calls from a second thread while the first is idle: one of a known kind, one of a new kind. Returns errors and counts."""
    autotax.torch.install(db)
    call()
    errors: list[str] = []

    def work() -> None:
        for rows in (8, 12):
            try:
                call(rows)
            except UsageError as error:
                errors.append(str(error))

    thread = threading.Thread(target=work, name="second")
    thread.start()
    thread.join()
    call()
    call(12)
    return errors, ended()


def in_two_groups(world: World, db: str) -> Status:
    """Calls in turn in the group of all ranks, in a second one of the same ranks, and in one of this rank alone."""
    second = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    autotax.torch.install(db)
    a, b = normal(8, 40, seed=world.rank), laid_out(40, 24, "nk", 7)
    for _ in range(3):
        for process_group in (dist.group.WORLD, second, alone):
            name = str(process_group.group_name)
            _, (y,) = OPS.fused_all_gather_matmul(a, [b], 0, name, return_A=False)
            same(y, symm_mem.torch_all_gather_matmul(a, [b], 0, name)[1][0])
    return ended()


def with_gradients(world: World, db: str) -> Status:
    """A call that needs gradients: it behaves like torch's operator, which records it on CPU ranks."""
    autotax.torch.install(db)
    a, b = normal(8, 40, seed=world.rank).requires_grad_(), laid_out(40, 24, "nk", 7)
    _, (y,) = OPS.fused_all_gather_matmul(a, [b], 0, group())
    assert y.requires_grad
    with torch.no_grad():
        _, (y,) = OPS.fused_all_gather_matmul(a, [b], 0, group(), return_A=False)
        assert not y.requires_grad
    return ended()


def wrong_arguments(_: World, db: str) -> list[str]:
    """Torch's errors for wrong arguments, with and without our operators."""
    a, b = normal(8, 40, seed=1), laid_out(40, 24, "nk", 7)
    wrong: list[Callable[[], Any]] = [
        lambda: OPS.fused_all_gather_matmul(a, [b.t()], 0, group()),
        lambda: OPS.fused_matmul_reduce_scatter(a, b.t(), "sum", 0, group()),
        lambda: OPS.fused_matmul_reduce_scatter(a[:7], b, "sum", 0, group()),
        lambda: OPS.fused_matmul_reduce_scatter(a, b, "max", 0, group()),
    ]
    autotax.torch.install(db)
    errors = []
    for attempt in wrong:
        try:
            attempt()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    ended()
    return errors


def attention_like_torch(world: World, db: str, balanced: bool, causal: bool, calls: Sequence[tuple[int, ...]]) -> Status:
    """Compares the attention of context parallelism, for (batch, query heads, KV heads, tokens, elements), with torch's own. The
    first call seems to be captured.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    own, op = getattr(theirs, FUNCTION), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    autotax.torch.install(db)
    options = theirs._cp_options
    before, options.enable_load_balance = options.enable_load_balance, balanced
    try:
        for number, (batch, heads, kv_heads, tokens, dim) in enumerate(calls):
            captured = mock.patch.object(plans, "capturing", return_value=number == 0)
            q, k, v = (
                normal(batch, some, tokens, dim, seed=100 * number + 10 * world.rank + which).bfloat16()
                for which, some in enumerate((heads, kv_heads, kv_heads))
            )
            repeated_pair = [tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (k, v)]
            expected, sums = own(dist.group.WORLD, 2, op, q, *repeated_pair, is_causal=causal)
            keys = (q, *repeated_pair) if number == 0 else (q, k, v)
            with captured, warnings.catch_warnings(action="ignore"):
                output, lse = getattr(theirs, FUNCTION)(dist.group.WORLD, 2, op, *keys, is_causal=causal)
            assert output.shape == expected.shape
            assert torch.allclose(output, expected, atol=2e-2)
            assert torch.allclose(lse, sums, atol=1e-2)
    finally:
        options.enable_load_balance = before
    status = ended()
    assert getattr(theirs, FUNCTION) is own
    return status
