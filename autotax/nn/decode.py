"""Attention of one token a sequence over a KV cache whose tokens are spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.errors import UsageError
from autotax.hardware import Hardware, detect
from autotax.nn import ops  # noqa: F401 - registers torch.ops.autotax.*
from autotax.nn.agree import DTYPES, configs_for
from autotax.nn.module import (
    VECTOR_BYTES,
    Choice,
    Module,
    first_size,
    remember,
    require_no_grad,
    require_tensor,
    sizes_up_to,
    world_of,
)
from autotax.nn.plain import PlainDecode
from autotax.problem import FlashDecode as Shape
from autotax.problem import Problem

Call = Callable[..., Any]
Known = tuple[Call, tuple[int], tuple[int, int, int]]
"""What runs for shapes of q, the cache and the block table, and the shapes that kv_lens and the result have then."""


class FlashDecode(Module):
    """Attention of one token a sequence, scaled by 1 / sqrt(head_dim). One module serves all layers of the same sizes.

    Construction is collective over `group` (None: all ranks, or this process alone).

    - `max_batch`, `max_kv_len`: the most sequences of a call, and the most tokens of a sequence over all ranks. It is
      `max_kv_len` that is looked up as kv_len, whatever the room that calls bring.
    - `sizes`: batches to prepare for; default: powers of two. `fused` and `single` serve these batches alone, every other
      batch is bulk-synchronous.
    - `output`: "replicated", every rank gets all heads; or "head_scatter", rank r gets heads r*H ... r*H + H - 1 of the
      H = q_heads / ranks that each has, which an output projection sharded by rows takes. Less travels.
    - `page`: 0, K and V are contiguous; or the tokens of a page (16 or 64), K and V are pools of pages and calls bring a block
      table.
    - `device`: where the tensors will be; default: the current GPU, or else the CPU.
    - `db`: the database, a path or a URL; default: yours. `config`: this config for `max_batch`, without any look-up.
    - `conditions`: as what calls are deployed, see AllGatherLinear.

    Raises UsageError on all ranks alike. Falls back and warns as AllGatherLinear does.
    """

    def __init__(
        self,
        kv_heads: int,
        q_heads: int,
        head_dim: int,
        max_batch: int,
        max_kv_len: int,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        output: str = "replicated",
        page: int = 0,
        device: torch.device | str | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        place = _device(device)
        super().__init__(world_of(group, place), place)
        self._dtype = dtype
        self._calls: dict[tuple[int, int], Call] = {}
        self._known: dict[tuple[torch.Size, ...], Known] = {}
        self._made: dict[int, list[Any]] = {}
        world = self._world

        def problems_here() -> list[Shape]:
            if dtype not in DTYPES:
                raise UsageError(f"dtype is {dtype}; allowed are {', '.join(map(str, DTYPES))}: give one of these")
            most = Shape(max_batch, q_heads, kv_heads, head_dim, max_kv_len, DTYPES[dtype], self.world_size, output, page)
            batches = sizes_up_to(most.batch, 1, [most.batch] if config else sizes)
            return [replace(most, batch=batch) for batch in batches]

        problems, deployed = self._agreed(problems_here, conditions)
        self._most = problems[-1]
        self.out_heads = self._most.out_heads
        """Query heads of which this rank gets the output."""
        self._plain = PlainDecode(world, scatter=output == "head_scatter")
        if world is not None:
            hardware = detect(world.backend)
            self._tune(problems, hardware, *configs_for(world, problems, hardware, deployed, db, config))

    def _tune(self, problems: list[Shape], hardware: Hardware, configs: Sequence[Config | None], notes: list[str]) -> None:
        """Prepares what is tuned for some batch, and on GPUs the bulk-synchronous kernels beside it; `notes` are what the user
        should know of that. Collective.
        """
        from autotax.spaces import space_for

        wanted: list[tuple[Problem, Config]] = []
        for problem, chosen in zip(problems, configs, strict=True):
            wanted += [(problem, chosen)] if chosen else []
            if hardware.on_gpu and not (chosen and chosen.variant == "bsp"):
                wanted.append((problem, space_for(problem, hardware).default("bsp")))
        for operator in self._ready(wanted, hardware, notes):
            self._made.setdefault(operator.problem.batch, []).append(operator)
        pairs = zip(problems, configs, strict=True)
        self.choices = tuple(Choice(problem, self._made_of(problem, chosen)) for problem, chosen in pairs)
        self._warn(notes)

    def _made_of(self, problem: Shape, config: Config | None) -> Config | None:
        """`config`, if it was agreed on and could be prepared."""
        made = [operator.config for operator in self._made.get(problem.batch, ())]
        return config if config in made else None

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """See Module._rehearsals."""
        from autotax.nn.prepare import SPECIALIZED, one_of_each_kind, special

        assert isinstance(problem, Shape)
        below = max((size.batch for size in self._batches() if size.batch < problem.batch), default=0)
        near = iter([*range(problem.batch, max(below, problem.batch - 32), -1), below + 1])
        length, page = problem.shard_len, problem.page
        fewer = range((problem.pages - 1) * page, 0, -page) if page else (*range(length - 1, max(0, length - 32), -1), 1)
        lengths = one_of_each_kind(iter([length, *fewer]), special)
        q = torch.empty(problem.batch, problem.q_heads, problem.head_dim, dtype=self._dtype, device=self._device)
        out = q.new_empty(problem.batch, problem.out_heads, problem.head_dim)
        cache = q.new_empty(16)  # of the cache only the address is asked for
        counts = torch.zeros(problem.batch, dtype=torch.int32, device=self._device)
        table = [counts] if page else []

        def kind(batch: int) -> object:
            rows = batch * problem.q_heads
            # Size and alignment of what bulk-synchronous sends to an owner follow from how many rows it owns.
            owned = batch * problem.out_heads % SPECIALIZED if problem.output == "head_scatter" else 0
            return special(batch * problem.kv_heads), special(rows), rows * problem.head_dim % 4 == 0, owned

        for batch in one_of_each_kind(near, kind):
            for tokens in lengths:
                yield self._problem(batch, tokens), (q[:batch], cache, cache, counts[:batch], *table, out[:batch])

    def _batches(self) -> list[Shape]:
        return [choice.problem for choice in self.choices if isinstance(choice.problem, Shape)]

    def _problem(self, batch: int, tokens: int) -> Shape:
        most = self._most
        length = tokens * most.world_size if tokens < most.shard_len else most.kv_len
        return replace(most, batch=batch, kv_len=length)

    def forward(
        self,
        q: Tensor,
        k_shard: Tensor,
        v_shard: Tensor,
        kv_lens: Tensor,
        block_table: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The attention of q [B, q_heads, head_dim], which is the same on all ranks: [B, out_heads, head_dim], in `out` if given.

        k_shard, v_shard [B, kv_heads, S, head_dim]: room for S tokens of each sequence on this rank; kv_lens int32 [B]: how
        many this rank holds of each, at most S (not checked: that would wait for the device). S may differ from rank to
        rank, B may not.

        With pages k_shard and v_shard are [P, page, kv_heads, head_dim], any number of pages that sequences may share, and
        block_table int32 [B, pages of the longest] holds the page numbers of each sequence on this rank, in the order of its
        tokens; entries beyond a sequence's length are not read.

        Enqueues on the current stream; every rank must make the same calls in the same order. Raises
        UsageError for what is not allowed, before anything is enqueued.
        """
        require_no_grad(q, k_shard, v_shard)
        if not is_compiling():
            return self.run(q, k_shard, v_shard, kv_lens, block_table, out)
        if out is None:
            return torch.ops.autotax.flash_decode(q, k_shard, v_shard, kv_lens, self.handle, block_table)
        torch.ops.autotax.flash_decode_out(q, k_shard, v_shard, kv_lens, out, self.handle, block_table)
        return out

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """What `forward` does; for the operators of torch.ops."""
        dtype, device = self._dtype, self._device
        cache = k.shape
        # All that can be wrong, in one question whose parts cost least; `_checked` finds out what it is, and knows new shapes.
        known = self._known.get((q.shape, cache) if table is None else (q.shape, cache, table.shape))
        if not (
            known
            and v.shape == cache
            and lengths.shape == known[1]
            and q.dtype is k.dtype is v.dtype is dtype
            and lengths.dtype is torch.int32
            and q.device == k.device == v.device == lengths.device == device
            and q.is_contiguous()
            and k.is_contiguous()
            and v.is_contiguous()
            and lengths.is_contiguous()
            and not (q.data_ptr() | k.data_ptr() | v.data_ptr() | lengths.data_ptr()) % VECTOR_BYTES
        ):
            known = self._checked(q, k, v, lengths, table, out)
        if table is not None:
            require_tensor("block_table", table, table.shape, torch.int32, device)
        call, _, shape = known
        if out is None:
            out = q.new_empty(*shape)
        else:
            require_tensor("out", out, shape, dtype, device)
        if table is None:
            call(q, k, v, lengths, out)
        else:
            call(q, k, v, lengths, table, out)
        return out

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, out: Tensor | None) -> Known:
        """What runs for these tensors, and from now on for all of their shapes. Raises UsageError; nothing is remembered then,
        see AllGatherLinear._checked.
        """
        self._require_open()
        most, dtype, device = self._most, self._dtype, self._device
        batch = first_size(q)
        shapes: tuple[torch.Size, ...]
        if (table is None) is (most.page > 0):
            raise UsageError(f"block_table is {'not ' * (table is None)}given, and page is {most.page}: give both, or neither")
        if table is None:
            shapes, tokens = (q.shape, k.shape), k.shape[2] if k.dim() == 4 else 0
            cache = batch, most.kv_heads, tokens, most.head_dim
        else:
            shapes, tokens = (q.shape, k.shape, table.shape), table.shape[1] * most.page if table.dim() == 2 else 0
            cache = first_size(k), most.page, most.kv_heads, most.head_dim
            require_tensor("block_table", table, (batch, tokens // most.page), torch.int32, device)
        require_tensor("q", q, (batch, most.q_heads, most.head_dim), dtype, device)
        require_tensor("k_shard", k, cache, dtype, device)
        require_tensor("v_shard", v, cache, dtype, device)
        require_tensor("kv_lens", lengths, (batch,), torch.int32, device)
        made = batch, self.out_heads, most.head_dim
        if out is not None:
            require_tensor("out", out, made, dtype, device)
        call = self._calls.get((batch, tokens)) or self._choose(batch, tokens)
        return remember(self._known, shapes, (call, (batch,), made))

    def _choose(self, batch: int, tokens: int) -> Call:
        """What runs for these sizes. Work of the host alone, done once for each pair of sizes."""
        most = self._most
        if not 1 <= batch <= most.batch:
            raise UsageError(f"q has {batch} sequences; it must have 1 to {most.batch}: give fewer, or a greater max_batch")
        if most.page and not 1 <= tokens <= most.pages * most.page:
            raise UsageError(
                f"block_table has {tokens // most.page} pages a sequence; a rank can have 1 to {most.pages} of max_kv_len "
                f"{most.kv_len}: give fewer, or a greater max_kv_len"
            )
        if not most.page and not 1 <= tokens <= most.shard_len:
            raise UsageError(
                f"k_shard has room for {tokens} tokens; a rank can have 1 to {most.shard_len} of max_kv_len {most.kv_len}: "
                "give a smaller one, or a greater max_kv_len"
            )
        call: Call = self._plain
        bucket = next(problem.batch for problem in self._batches() if batch <= problem.batch)
        if operators := self._made.get(bucket):
            from autotax.nn.fit import fitted

            fits = (fitted(operator, self._problem(batch, tokens)) for operator in operators)
            call = next((fit for fit in fits if fit), self._plain)
        return remember(self._calls, (batch, tokens), call)

    def _forget(self) -> None:
        self._known.clear()
        self._calls.clear()
        self._made.clear()


def _device(device: torch.device | str | None) -> torch.device:
    here = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if here.type == "cuda" and here.index is None else here
