"""Attention of one token a sequence, or a few, over a KV cache whose tokens are spread over the ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from operator import is_
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.nn import (
    custom_ops,  # noqa: F401 - registers torch.ops.autotax.*
    groups,
)
from autotax.nn.base import Request, increment_version
from autotax.nn.fallback import PlainDecode
from autotax.nn.groups import on_device
from autotax.nn.sized import SizedModule, first_size, nothing, remember
from autotax.nn.tensor_checks import (
    FREED,
    IN_OPS,
    PLAIN,
    VECTOR_BYTES,
    active_modes,
    alike,
    never,
    ordinal_of,
    plain,
    recorded,
    require_apart,
    require_no_tangent,
    require_tensor,
    resolved,
    small,
)
from autotax.operators import registry
from autotax.operators.flash_decode import FlashDecode as DecodeProblem
from autotax.operators.inputs import EIGHT_BITS

Call = Callable[..., Any]
MORE = "kv_starts", "kv_scales", "sinks"
Known = tuple[Call, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[Callable[..., bool]], bool]
"""The call for shapes of q, the cache and the block table, the shapes of kv_lens and of the result, and for the checks of a call:

- the bytes of q, K, kv_lens, the block table and the result;
- tests for the latest tensors that passed all checks, and for the latest of another kind (see Accepted): each of eager calls
  without and with `out`, and of calls of torch.ops without and with it;
- whether calls bring any of MORE.
"""
NO_CALL: Known = nothing, (), (), (0,) * 5, [never] * 8, False


class FlashDecode(SizedModule):
    """Attention of one token a sequence, scaled by 1 / sqrt(head_dim). One module serves all layers of the same sizes.

    Construction is collective over `group` (None: all ranks, or this process alone).

    - `max_batch`, `max_kv_len`: the most sequences of a call, and the most tokens of a sequence over all ranks. Look-ups use
      `max_kv_len` as kv_len, whatever the size of the cache in a call.
    - `sizes`: batches to prepare for; default: powers of two. `fused` and `single` serve these batches alone, every other
      batch is bulk-synchronous.
    - `output`: "replicated", every rank gets all heads; or "head_scatter", rank r gets heads r*H ... r*H + H - 1 of the
      H = q_heads / ranks that each has, as an output projection sharded by rows needs. Ranks exchange less.
    - `page`: 0, K and V are contiguous; or the tokens of a page (16 or 64), K and V are pools of pages and calls bring a block
      table.
    - `kv_dtype`: of K and V; default: `dtype`. torch.float8_e4m3fn or, on gfx942, torch.float8_e4m3fnuz: calls bring `kv_scales`.
    - `sinks`: calls bring a logit for each query head, one more term of the softmax's denominator.
    - `window`: a query token sees so many tokens, itself and those just before; calls bring `kv_starts`. 0: it sees all.
    - `queries`: query tokens of each sequence, its last ones. More than 1: q and the result are [B, heads, queries, head_dim].
    - `device`: where the tensors will be; default: the current GPU, or else the CPU.
    - `db`: the database, a path or a URL; default: yours. `config`: this config for `max_batch`, without any look-up.
    - `conditions`: see AllGatherLinear. `check`: compare calls over the ranks, also the values of q, and check lengths and
      block tables, which waits for the device and the other ranks; default: AUTOTAX_CHECK=1 in the environment.
    - `prove`: see AllGatherLinear.

    Raises UsageError on all ranks alike. Falls back and warns as AllGatherLinear does.
    """

    SIZE = "batch"
    _most: DecodeProblem
    _known: dict[tuple[torch.Size, ...], Known]
    _latest: Known
    _brings: tuple[bool, bool, bool]
    """Which of the optional tensors (MORE) a call brings."""

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
        kv_dtype: torch.dtype | None = None,
        sinks: bool = False,
        window: int = 0,
        queries: int = 1,
        device: torch.device | str | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        check: bool | None = None,
        prove: bool | float = False,
    ) -> None:
        super().__init__(group, db, check, prove, device)
        self._dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        self._several = (queries,) if queries != 1 else ()
        self._brings = window != 0, self._kv_dtype is not dtype, sinks
        self._limits = {
            "batch": max_batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "kv_len": max_kv_len,
            "output": output, "page": page, "sinks": "learned" if sinks else "none", "window": window, "queries": queries,
        }  # fmt: skip
        self._request = Request(conditions, config, sizes)
        self.prepare()

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_latest": NO_CALL}

    def _greatest(self, dtype: str) -> DecodeProblem:
        kinds = {self._dtype: "same"} | {kind: name for name, kind in EIGHT_BITS.items()}
        if self._kv_dtype not in kinds:
            raise UsageError(f"kv_dtype is {self._kv_dtype}; allowed are {', '.join(map(str, kinds))}: give one of these")
        return DecodeProblem(dtype=dtype, world_size=self.world_size, kv_dtype=kinds[self._kv_dtype], **self._limits)

    def _make_plain(self) -> PlainDecode:
        return PlainDecode(self._world, self._most)

    @property
    def out_heads(self) -> int:
        """Query heads whose output this rank gets."""
        heads: int = self._limits["q_heads"]
        return heads // self.world_size if self._limits["output"] == "head_scatter" else heads

    def _baselines(self, pairs: list[tuple[Any, Config | None]], hardware: Hardware) -> list[tuple[Any, Config]]:
        missing = [problem for problem, config in pairs if hardware.on_gpu and not (config and config.variant == "bsp")]
        return [(problem, registry.of(problem).fallback(problem, hardware)) for problem in missing]

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        from autotax.nn.prepare import SPECIALIZED, one_of_each_kind, special

        assert isinstance(problem, DecodeProblem)
        below = max((size.batch for size in self._batches() if size.batch < problem.batch), default=0)
        near = iter([*range(problem.batch, max(below, problem.batch - 32), -1), below + 1])
        length, page = problem.shard_len, problem.page
        fewer = range((problem.pages - 1) * page, 0, -page) if page else (*range(length - 1, max(0, length - 32), -1), 1)
        lengths = one_of_each_kind(iter([length, *fewer]), special)
        inner = *self._several, problem.head_dim
        q = torch.empty(problem.batch, problem.q_heads, *inner, dtype=self._dtype, device=self._device)
        out = q.new_empty(problem.batch, problem.out_heads, *inner)
        cache = q.new_empty(16, dtype=self._kv_dtype)  # the kernel needs only the addresses of the cache and the table
        counts = torch.zeros(problem.batch, *self._several, dtype=torch.int32, device=self._device)
        table = [counts] if page else []
        windowed, scaled, sinking = self._brings
        scales = [counts.new_empty(2, problem.kv_heads, dtype=torch.float32)] if scaled else []
        sinks = [counts.new_empty(problem.q_heads, dtype=torch.float32)] if sinking else []

        def kind(batch: int) -> object:
            rows = batch * problem.q_heads * problem.queries
            # Size and alignment of a bulk-synchronous message to an owner depend on the owner's number of rows.
            owned = batch * problem.out_heads * problem.queries % SPECIALIZED if problem.output == "head_scatter" else 0
            return special(batch * problem.kv_heads), special(rows), rows * problem.head_dim % 4 == 0, owned

        for batch in one_of_each_kind(near, kind):
            for tokens in lengths:
                starts = [counts[:batch]] if windowed else []
                tensors = q[:batch], cache, cache, counts[:batch], *table, *starts, *scales, *sinks, out[:batch]
                yield self._problem(batch, tokens), tensors

    def _batches(self) -> list[DecodeProblem]:
        return [choice.problem for choice in self.choices if isinstance(choice.problem, DecodeProblem)]

    def _problem(self, batch: int, tokens: int) -> DecodeProblem:
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
        *,
        kv_starts: Tensor | None = None,
        kv_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The attention of one query token of each sequence, or of several.

        Enqueues on the current stream of the module's device; every rank must make the same calls in the same order, one at a
        time. `autotax.nn.seen_tokens` makes kv_lens and kv_starts for several queries, `autotax.nn.kv_scales` the scales.

        Args:
            q: [B, q_heads, head_dim], the same on all ranks; with several `queries` [B, q_heads, queries, head_dim].
            k_shard: [B, kv_heads, S, head_dim], with room for S tokens of each sequence on this rank. S may differ from rank to
                rank, B may not. With pages it is [P, page, kv_heads, head_dim]. Sequences may share pages.
            v_shard: Like k_shard.
            kv_lens: int32 [B], the tokens of each sequence on this rank, at most S (looked at only with `check`: it waits for the
                device). With several queries [B, queries]: how many of them each query token sees.
            block_table: int32 [B, pages of the longest], the page numbers of each sequence on this rank, in the order of its
                tokens. Entries beyond a sequence's length are not read.
            out: Where to store the result. Default: a new tensor.
            kv_starts: With a window, shaped like kv_lens: the first token that a query token sees. Neither decreases from one
                query token to the next.
            kv_scales: float32 [2, kv_heads], for K and V of 8 bits.
            sinks: float32 [q_heads], the same on all ranks.

        Returns:
            [B, out_heads, head_dim], or [B, out_heads, queries, head_dim].

        Raises:
            UsageError: A tensor is not allowed; nothing is enqueued.
        """
        if is_dynamo_compiling():
            return self._traced(q, k_shard, v_shard, kv_lens, block_table, out, kv_starts, kv_scales, sinks)
        return self.run(q, k_shard, v_shard, kv_lens, block_table, out, kv_starts, kv_scales, sinks)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        table: Tensor | None = None,
        out: Tensor | None = None,
        starts: Tensor | None = None,
        scales: Tensor | None = None,
        sinks: Tensor | None = None,
        kind: int = 0,
    ) -> Tensor:
        """The body of `forward`; for the operators of torch.ops, whose calls are of `kind` IN_OPS."""
        if is_grad_enabled() and recorded(q, k, v, out, sinks):
            return self._record(q, k, v, lengths, table, out)
        if forward_ad._current_level >= 0:
            require_no_tangent(q, k, v, out)
        state = self.__dict__  # access to an attribute of a torch.nn.Module costs more than the check itself
        calls, index, check = state["_guards"]
        if index is not None and groups.current_device() != index:
            with on_device(index):
                return self.run(q, k, v, lengths, table, out, starts, scales, sinks, kind)
        if check and not is_compiling():
            # Not a lambda: closure variables would slow every call down.
            self._compare(partial(self._described, q, k, v, lengths, table, out, starts, scales, sinks))
        try:
            # The latest call's guard compares all that `_checked` does, addresses excepted, and costs less than a look at shapes.
            entry = state["_latest"]
            _, counts, shape, sizes, kinds, brings = entry
            tensors: tuple[Tensor, ...]
            accepted = (
                not active_modes()
                and q.__class__ is k.__class__ is v.__class__ is lengths.__class__ is Tensor
                and (start := q.data_ptr()) > FREED < (k_start := k.data_ptr())
                and (v_start := v.data_ptr()) > FREED < (lengths_start := lengths.data_ptr())
                and not (start | k_start | v_start | lengths_start) % VECTOR_BYTES
                and not (q.is_nested or k.is_nested or v.is_nested or lengths.is_nested)
                and (
                    table is None
                    or (
                        table.__class__ is Tensor
                        and (table_start := table.data_ptr()) > FREED
                        and not table_start % VECTOR_BYTES
                        and not table.is_nested
                    )
                )
            )
            if out is None:
                tensors = (q, k, v, lengths) if table is None else (q, k, v, lengths, table)
            else:
                kind += 1
                tensors = (q, k, v, lengths, out) if table is None else (q, k, v, lengths, table, out)
                if accepted:
                    size, cache_size, lengths_size, table_size, out_size = sizes
                    accepted = (
                        out.__class__ is Tensor
                        and (out_start := out.data_ptr()) > FREED
                        and not out_start % VECTOR_BYTES
                        and not out.is_nested
                        and ((end := out_start + out_size) <= start or out_start >= start + size)
                        and (end <= k_start or out_start >= k_start + cache_size)
                        and (end <= v_start or out_start >= v_start + cache_size)
                        and (end <= lengths_start or out_start >= lengths_start + lengths_size)
                        and (table is None or end <= table_start or out_start >= table_start + table_size)
                    )
            if not (accepted and (kinds[kind](*tensors) or kinds[kind + 4](*tensors))):
                earlier = state["_known"].get((q.shape, k.shape) if table is None else (q.shape, k.shape, table.shape), entry)
                if kind < IN_OPS and is_compiling():  # torch.export without Dynamo gives fake tensors
                    return self._traced(q, k, v, lengths, table, out, starts, scales, sinks)
                if earlier is not entry:  # the shapes of another call than the latest
                    state["_latest"] = earlier
                    return self.run(q, k, v, lengths, table, out, starts, scales, sinks, kind & IN_OPS)
                q, k, v, lengths, table, entry = self._checked(q, k, v, lengths, table, out, kind)
                _, counts, shape, _, _, brings = entry
                calls = state["_guards"][0]  # of the group, which the call may have changed by preparing the module
            more: tuple[Tensor, ...] = ()
            if brings or starts is not None or scales is not None or sinks is not None:
                more = self._checked_more(counts, starts, scales, sinks)
            if out is None:
                out = q.new_empty(*shape)
            else:
                if more:
                    require_apart("out", out, **dict(zip(compress(MORE, self._brings), more, strict=True)))
                increment_version((out,))
        except (RuntimeError, AttributeError) as error:
            inputs = {"q": q, "k_shard": k, "v_shard": v, "kv_lens": lengths, "block_table": table, "out": out}
            q, k, v, lengths, table, out, starts, scales, sinks = resolved(
                error, **inputs, kv_starts=starts, kv_scales=scales, sinks=sinks
            )
            return self.run(q, k, v, lengths, table, out, starts, scales, sinks, kind & IN_OPS)
        here = get_ident()
        if calls.thread and calls.thread != here:
            raise calls.overlap()
        calls.thread = here
        call = entry[0]
        try:
            if table is None:
                call(q, k, v, lengths, *more, out)
            else:
                call(q, k, v, lengths, table, *more, out)
        finally:
            calls.thread = 0
        return out

    def _traced(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, out: Tensor | None, *more: Tensor | None
    ) -> Tensor:
        """The call for torch.compile and torch.export; `more` are starts, scales and sinks."""
        if torch.is_grad_enabled() and recorded(q, k, v, out, more[-1]):
            return self._record(q, k, v, lengths, table, out)
        if out is None:
            return torch.ops.autotax.flash_decode(q, k, v, lengths, self.handle, table, *more)
        torch.ops.autotax.flash_decode_out(q, k, v, lengths, out, self.handle, table, *more)
        return out

    def _checked_more(
        self, counts: tuple[int, ...], starts: Tensor | None, scales: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The optional tensors of a call, checked: kv_starts in the shape of kv_lens, kv_scales and sinks. Raises UsageError."""
        most, device, ordinal = self._most, self._device, ordinal_of(self._device)
        shapes = counts, (2, most.kv_heads), (most.q_heads,)
        types = torch.int32, torch.float32, torch.float32
        taken = []
        for name, shape, dtype, brought, tensor in zip(MORE, shapes, types, self._brings, (starts, scales, sinks), strict=True):
            if (tensor is None) is brought:
                options = f"window is {most.window}", f"kv_dtype is {self._kv_dtype}", f"sinks is {most.sinks == 'learned'}"
                option = options[MORE.index(name)]
                raise UsageError(f"{name} is {'not ' * (tensor is None)}given, and {option}: give both, or neither")
            if tensor is None:
                continue
            if not (
                tensor.__class__ in PLAIN
                and tensor.shape == shape
                and tensor.dtype is dtype
                and tensor.get_device() == ordinal
                and tensor.is_contiguous()
                and (start := tensor.data_ptr()) > FREED
                and not start % VECTOR_BYTES
                and not tensor.is_neg()
            ):
                tensor = small(name, tensor, dtype, device) if name == "kv_starts" else plain(name, tensor)
                require_tensor(name, tensor, shape, dtype, device)
            taken.append(tensor)
        return tuple(taken)

    def _described(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        table: Tensor | None,
        out: Tensor | None,
        starts: Tensor | None,
        scales: Tensor | None,
        sinks: Tensor | None,
    ) -> str:
        """A description of the call, which must be the same on all ranks.

        Raises UsageError for a call that this rank refuses, and for lengths and page numbers beyond the cache.
        """
        q, k, v, lengths, table, entry = self._checked(q, k, v, lengths, table, out)
        more = self._checked_more(entry[1], starts, scales, sinks)
        if out is not None:
            require_apart("out", out, **dict(zip(compress(MORE, self._brings), more, strict=True)))
        room = k.shape[2] if table is None else table.shape[1] * k.shape[1]
        if starts is not None and bool(((starts < 0) | (starts > lengths)).any()):
            raise UsageError(
                f"kv_starts has {starts.tolist()}; each must be from 0 to kv_lens, {lengths.tolist()}: give such ones"
            )
        if self._several and any(bool((tensor.diff(dim=1) < 0).any()) for tensor in (lengths, starts) if tensor is not None):
            raise UsageError("kv_lens or kv_starts decrease from one query token to the next: give query tokens in their order")
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= room:
            raise UsageError(f"kv_lens has {lengths.tolist()}; a sequence can have 0 to {room} tokens here: give such lengths")
        if table is not None:
            place = torch.arange(table.shape[1], device=table.device) * k.shape[1]
            read = place < lengths.view(len(lengths), -1)[:, -1:]
            if starts is not None:
                read &= place + k.shape[1] > starts.view(len(lengths), -1)[:, :1]
            if bool((read & ((table < 0) | (table >= len(k)))).any()):
                raise UsageError(f"block_table names pages beyond the {len(k)} of k_shard: give numbers from 0 to {len(k) - 1}")
        shared = [q] if sinks is None else [q, sinks]
        data = b"".join(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for tensor in shared)
        what = "q" if sinks is None else "q and sinks"
        return f"{what} {q.dtype} {list(q.shape)} of digest {hashlib.sha256(data).hexdigest()[:16]}"

    def _checked(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, out: Tensor | None, kind: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Known]:
        """Converts the tensors for kernels, and remembers the call for all later tensors of these shapes.

        Raises UsageError, and then remembers nothing: see ParallelLinear._checked.
        """
        self._ensure_ready()
        most, dtype, kv_dtype, device = self._most, self._dtype, self._kv_dtype, self._device
        originals = q, k, v, lengths, table
        q, lengths = small("q", q, dtype, device), small("kv_lens", lengths, torch.int32, device)
        k, v = plain("k_shard", k), plain("v_shard", v)
        table = None if table is None else small("block_table", table, torch.int32, device)
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
        require_tensor("q", q, (batch, most.q_heads, *self._several, most.head_dim), dtype, device)
        require_tensor("k_shard", k, cache, kv_dtype, device)
        require_tensor("v_shard", v, cache, kv_dtype, device)
        counts = batch, *self._several
        require_tensor("kv_lens", lengths, counts, torch.int32, device)
        made = batch, self.out_heads, *self._several, most.head_dim
        if out is not None:
            require_tensor("out", out, made, dtype, device)
            require_apart("out", out, q=q, k_shard=k, v_shard=v, kv_lens=lengths, block_table=table)
        entry = self._known.get(shapes)
        if not entry:
            call = (self._calls.get((batch, tokens)) or self._choose(batch, tokens)) if batch else nothing
            sizes = q.nbytes, k.nbytes, lengths.nbytes, 0 if table is None else table.nbytes, math.prod(made) * dtype.itemsize
            entry = remember(self._known, shapes, (call, counts, made, sizes, [never] * 8, any(self._brings)))
        vars(self)["_latest"] = entry
        tensors = q, k, v, lengths, table
        if all(map(is_, tensors, originals)):
            tests = entry[4]
            tests[kind], tests[kind + 4] = alike(*(tensor for tensor in (*tensors, out) if tensor is not None)), tests[kind]
        return q, k, v, lengths, table, entry

    def _choose(self, batch: int, tokens: int) -> Call:
        """The call for these sizes, chosen once for each pair of sizes."""
        most = self._most
        if batch > most.batch:
            raise UsageError(f"q has {batch} sequences; it must have at most {most.batch}: give fewer, or a greater max_batch")
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
            fits = (operator.fitted(self._problem(batch, tokens)) for operator in operators)
            call = next((fit for fit in fits if fit), self._plain)
        return remember(self._calls, (batch, tokens), call)

    def extra_repr(self) -> str:
        batch, q_heads, kv_heads, dim, kv_len, output, page, *more = self._limits.values()
        settings = dict(zip(("page", "kv_dtype", "sinks", "window", "queries"), (page, self._kv_dtype, *more), strict=True))
        defaults = {"page": 0, "kv_dtype": self._dtype, "sinks": "none", "window": 0, "queries": 1}
        unusual = "".join(f", {name}={value}" for name, value in settings.items() if value != defaults[name])
        sizes = f"q_heads={q_heads}, kv_heads={kv_heads}, head_dim={dim}, max_batch={batch}, max_kv_len={kv_len}"
        return f"{sizes}, dtype={self._dtype}, output={output}{unusual}, ranks={self.world_size}"


def seen_tokens(
    lengths: Tensor, rank: int, ranks: int, *, queries: int = 1, window: int = 0, interleave: int = 1
) -> tuple[Tensor, Tensor]:
    """The tokens of a rank that query tokens see. A query token sees itself and earlier tokens.

    Args:
        lengths: int [B], the tokens of whole sequences over all ranks, including the query tokens at the end.
        rank: The rank whose tokens are counted.
        ranks: The number of ranks.
        queries: Query tokens of each sequence. If a sequence has fewer tokens, its first queries see none.
        window: A query token sees the last so many tokens, itself included. 0: all.
        interleave: The ranks get tokens in turn, so many neighbours at a time. 1 is vLLM's default; the cache's tokens per
            sequence and rank give each rank one piece.

    Returns:
        `kv_lens` and `kv_starts`, int32 [B], or [B, queries] with several queries.
    """
    turn = interleave * ranks
    behind = lengths[:, None] - queries + 1 + torch.arange(queries, device=lengths.device)

    def before(place: Tensor) -> Tensor:
        """The number of this rank's tokens before a position of the sequence."""
        place = place.clamp(min=0)
        return place // turn * interleave + (place % turn - rank * interleave).clamp(0, interleave)

    ends = before(behind)
    starts = before(behind - window) if window else torch.zeros_like(ends)
    shape = (len(lengths), queries) if queries > 1 else (len(lengths),)
    return ends.to(torch.int32).view(shape), starts.to(torch.int32).view(shape)


def kv_scales(
    k_scale: Tensor | float, v_scale: Tensor | float, kv_heads: int, device: torch.device | str | None = None
) -> Tensor:
    """The scales of a layer's 8-bit K and V. An element is its 8-bit value times the scale of its head.

    Args:
        k_scale: One number, or one for each KV head.
        v_scale: Likewise.
        kv_heads: The number of KV heads.
        device: Where the result is. Default: that of the scales, or else the CPU.

    Returns:
        float32 [2, kv_heads], for FlashDecode.
    """
    tensor = (torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(-1) for scale in (k_scale, v_scale))
    return torch.stack([scale.expand(kv_heads) for scale in tensor])
