"""The exchange of context-parallel decoding: partial results of any attention kernel, one a rank, merged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.nn import (
    custom_ops,  # noqa: F401 - registers torch.ops.autotax.*
    groups,
)
from autotax.nn.base import Request, increment_version
from autotax.nn.fallback import PlainMerge
from autotax.nn.groups import on_device
from autotax.nn.sized import SizedModule, nothing, remember
from autotax.nn.tensor_checks import (
    FREED,
    VECTOR_BYTES,
    Accepted,
    active_modes,
    plain,
    recorded,
    require_apart,
    require_no_tangent,
    require_tensor,
    resolved,
    small,
)
from autotax.operators.decode_merge import DecodeMerge as MergeProblem

Call = Callable[..., Any]
Known = tuple[Call, int, torch.Size, torch.Size, int, int, Accepted, Accepted]
"""The call for a shape of O, its query tokens, and the shapes of the merged O and LSE.

Then for the checks of a call: the bytes of both O, and the inputs and results that calls accept as they are.
"""


class DecodeMerge(SizedModule):
    """The merge of each rank's O and LSE, weighed by base^LSE. One module serves all layers of the same sizes.

    Construction is collective over `group` (None: all ranks, or this process alone).

    - `heads`, `head_dim`: of O, which has all heads on every rank. `max_batch`: the most query tokens of a call; a sequence
      with several of them counts as often.
    - `sizes`: numbers of query tokens to prepare for; default: powers of two. A call uses the config of the next greater
      number and exchanges that many tokens.
    - `output`: "replicated", every rank gets all heads; or "head_scatter", rank r gets heads r*H ... r*H + H - 1 of the
      H = heads / ranks that each has, as an output projection sharded by rows needs. Ranks exchange less.
    - `base`: the base of the log-sum-exps, "e" (FlashAttention, FlashMLA) or "2" (FlashInfer).
    - `masked`: calls bring `seq_lens` and `query_start_loc`; kernels are also compiled for these.
    - `device`, `db`, `conditions`, `config`, `check`: see FlashDecode.

    Raises UsageError on all ranks alike. Falls back and warns as AllGatherLinear does.
    """

    SIZE = "batch"
    _most: MergeProblem
    _known: dict[torch.Size, Known]
    _scratch_lse: Tensor
    """Receives the merged LSE when the caller does not request it."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        max_batch: int,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        output: str = "replicated",
        base: str = "e",
        masked: bool = False,
        device: torch.device | str | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        check: bool | None = None,
    ) -> None:
        super().__init__(group, db, check, device=device)
        self._dtype, self._masked = dtype, masked
        self._limits = {"batch": max_batch, "heads": heads, "head_dim": head_dim, "output": output, "base": base}
        self._request = Request(conditions, config, sizes)
        self.prepare()

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_scratch_lse": None}

    def _greatest(self, dtype: str) -> MergeProblem:
        return MergeProblem(dtype=dtype, world_size=self.world_size, **self._limits)

    def _make_plain(self) -> PlainMerge:
        self._scratch_lse = torch.empty(self._most.batch, self.out_heads, dtype=torch.float32, device=self._device)
        return PlainMerge(self._world, scatter=self._most.output == "head_scatter", base=self._most.base)

    @property
    def out_heads(self) -> int:
        """Heads whose output this rank gets."""
        heads: int = self._limits["heads"]
        return heads // self.world_size if self._limits["output"] == "head_scatter" else heads

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """Other numbers of tokens and other strides of LSE need no further compilation."""
        assert isinstance(problem, MergeProblem)
        o = torch.empty(problem.batch, problem.heads, problem.head_dim, dtype=self._dtype, device=self._device)
        lse = o.new_empty(problem.batch, problem.heads, dtype=torch.float32)
        out = o.new_empty(problem.batch, problem.out_heads, problem.head_dim)
        tensors = o, lse, self._scratch_lse[: problem.batch], out
        yield problem, tensors
        if self._masked:
            held = tuple(torch.zeros(1 + more, dtype=torch.int32, device=self._device) for more in (0, 1))
            yield problem, (*tensors, held)  # type: ignore[misc]

    def forward(
        self,
        o: Tensor,
        lse: Tensor,
        out: Tensor | None = None,
        merged_lse: Tensor | None = None,
        *,
        return_lse: bool = False,
        seq_lens: Tensor | None = None,
        query_start_loc: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Merges the partial attention of all ranks by their log-sum-exps.

        A row whose lse is -inf, +inf or NaN is empty, whatever o holds there. A row that is empty on all ranks is 0, with lse
        -inf. Enqueues on the current stream of the module's device; every rank must make the same calls in the same order, one
        at a time.

        Args:
            o: [..., heads, head_dim], this rank's part. Leading dimensions are query tokens, for instance [batch, queries].
            lse: float32 [..., heads], with any strides.
            out: Where to store the result. Default: a new tensor.
            merged_lse: Where to store the merged log-sum-exps. Default: a new tensor.
            return_lse: Whether to return the merged log-sum-exps too.
            seq_lens: For a `masked` module: int32 [sequences], how many tokens of each sequence this rank holds. Without any, the
                rows of the sequence are empty.
            query_start_loc: For a `masked` module: int32 [sequences + 1], the first query token of each sequence and the end.
                Rows after the last sequence are empty.

        Returns:
            [..., out_heads, head_dim]; with `return_lse` also float32 [..., out_heads].

        Raises:
            UsageError: A tensor is not allowed; nothing is enqueued.
        """
        if not is_compiling():
            result, merged = self.run(o, lse, out, merged_lse, seq_lens, query_start_loc, requested=return_lse)
        elif torch.is_grad_enabled() and recorded(o, lse, out, merged_lse):
            self._record(o, lse, out, merged_lse)
        elif out is None and merged_lse is None:
            result, merged = torch.ops.autotax.decode_merge(o, lse, self.handle, seq_lens, query_start_loc)
        else:
            before = o.shape[:-2]
            result = o.new_empty(*before, self.out_heads, o.shape[-1], dtype=self._dtype) if out is None else out
            merged = lse.new_empty(*before, self.out_heads, dtype=torch.float32) if merged_lse is None else merged_lse
            torch.ops.autotax.decode_merge_out(o, lse, result, merged, self.handle, seq_lens, query_start_loc)
        return (result, merged) if return_lse else result

    def run(
        self,
        o: Tensor,
        lse: Tensor,
        out: Tensor | None = None,
        merged: Tensor | None = None,
        seq_lens: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        *,
        requested: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The body of `forward`; for the operators of torch.ops. The merged LSE has no meaning unless it is `requested`."""
        if is_grad_enabled() and recorded(o, lse, out, merged):
            self._record(o, lse, out, merged)
        if forward_ad._current_level >= 0:
            require_no_tangent(o, lse, out, merged)
        state = self.__dict__
        calls, index, check = state["_guards"]
        if index is not None and groups.current_device() != index:
            with on_device(index):
                return self.run(o, lse, out, merged, seq_lens, query_start_loc, requested=requested)
        if check:
            # Not a lambda: closure variables would slow every call down.
            self._compare(partial(self._described, o, lse, out, merged, seq_lens, query_start_loc))
        try:
            # One expression accepts almost every call. For the others `_checked` finds the fault, or adds a kind of tensors.
            entry = state["_known"].get(o.shape)
            if not (
                entry
                and not active_modes()
                and o.__class__ is lse.__class__ is Tensor
                and (start := o.data_ptr()) > FREED < (lse_start := lse.data_ptr())
                and not start % VECTOR_BYTES
                and not lse.is_nested
                and (entry[6].first(o, lse) or entry[6].second(o, lse))
            ):
                o, lse, entry = self._checked(o, lse, out, merged)
                start, lse_start = o.data_ptr(), lse.data_ptr()
                calls = state["_guards"][0]  # the call may have prepared the module, which sets `_guards`
            held = None if seq_lens is None and query_start_loc is None else self._held(seq_lens, query_start_loc)
            call, tokens, shape, lse_shape, size, out_size, _, kinds = entry
            if out is None:
                out = o.new_empty(*shape)
            else:
                if not (
                    out.__class__ is Tensor
                    and (out_start := out.data_ptr()) > FREED
                    and not out_start % VECTOR_BYTES
                    and not out.is_nested
                    and (kinds.first(out) or kinds.second(out))
                    and not -out_size < out_start - start < size
                    and lse.is_contiguous()
                    and not -out_size < out_start - lse_start < lse.nbytes
                    and held is None
                ):
                    require_tensor("out", out, shape, self._dtype, self._device)
                    require_apart("out", out, o=o, lse=lse, seq_lens=seq_lens, query_start_loc=query_start_loc)
                    kinds.add(out)
                increment_version((out,))
            if merged is not None:
                require_tensor("merged_lse", merged, lse_shape, torch.float32, self._device)
                require_apart("merged_lse", merged, o=o, lse=lse, seq_lens=seq_lens, query_start_loc=query_start_loc, out=out)
                increment_version((merged,))
            elif requested:
                merged = lse.new_empty(*lse_shape)
            else:
                merged = self._scratch_lse[:tokens]
        except (RuntimeError, AttributeError) as error:
            rows = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
            return self.run(*resolved(error, o=o, lse=lse, out=out, merged_lse=merged, **rows), requested=requested)
        lse = lse if lse.dim() == 2 else lse.view(tokens, lse.shape[-1])
        here = get_ident()
        if calls.thread and calls.thread != here:
            raise calls.overlap()
        calls.thread = here
        try:
            if held is None:
                call(o, lse, merged, out)
            else:
                call(o, lse, merged, out, held)
        finally:
            calls.thread = 0
        return out, merged

    def _held(self, seq_lens: Tensor | None, query_start_loc: Tensor | None) -> tuple[Tensor, Tensor]:
        """Converts both tensors for kernels. Raises UsageError."""
        if seq_lens is None or query_start_loc is None:
            missing = "seq_lens" if seq_lens is None else "query_start_loc"
            raise UsageError(f"{missing} is not given; seq_lens and query_start_loc belong together: give both, or neither")
        if not self._masked:
            raise UsageError("seq_lens is given to a module that was made without them; make it with masked=True")
        seq_lens, query_start_loc = plain("seq_lens", seq_lens), plain("query_start_loc", query_start_loc)
        sequences = seq_lens.numel()
        if not sequences:
            raise UsageError("seq_lens has no sequences; there must be one at least: give one of length 0")
        held = []
        for name, tensor, size in (("seq_lens", seq_lens, sequences), ("query_start_loc", query_start_loc, sequences + 1)):
            if tensor.shape != (size,) or tensor.is_floating_point() or tensor.is_complex() or tensor.device != self._device:
                described = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                raise UsageError(f"{name} is {described}; it must be torch.int32 [{size}] on {self._device}: give such a tensor")
            held.append(tensor.to(torch.int32).contiguous())
        return held[0], held[1]

    def _described(
        self,
        o: Tensor,
        lse: Tensor,
        out: Tensor | None,
        merged: Tensor | None,
        seq_lens: Tensor | None,
        query_start_loc: Tensor | None,
    ) -> str:
        """A description of the call, which must be the same on all ranks. Raises UsageError for what this rank refuses."""
        o, *_ = self._checked(o, lse, out, merged)
        if seq_lens is not None or query_start_loc is not None:
            self._held(seq_lens, query_start_loc)
            written = {name: tensor for name, tensor in (("out", out), ("merged_lse", merged)) if tensor is not None}
            for name, tensor in written.items():
                require_apart(name, tensor, seq_lens=seq_lens, query_start_loc=query_start_loc)
        return f"o {o.dtype} {list(o.shape)}"

    def _checked(self, o: Tensor, lse: Tensor, out: Tensor | None, merged: Tensor | None) -> tuple[Tensor, Tensor, Known]:
        """Converts O and LSE for kernels, and remembers the call for all later tensors of this shape.

        Raises UsageError, and then remembers nothing: see ParallelLinear._checked.
        """
        self._ensure_ready()
        most, dtype, device = self._most, self._dtype, self._device
        original_o, original_lse = o, lse
        o, lse = small("o", o, dtype, device), plain("lse", lse)
        if lse.device == device and lse.dim() != 2:
            lse = lse.contiguous()
        before = o.shape[:-2]
        require_tensor("o", o, (*before, most.heads, most.head_dim), dtype, device)
        if lse.shape != o.shape[:-1] or lse.dtype is not torch.float32 or lse.device != device:
            described = f"{lse.dtype} {list(lse.shape)} on {lse.device}"
            raise UsageError(f"lse is {described}; it must be torch.float32 {list(o.shape[:-1])} on {device}: give such a tensor")
        shape, lse_shape = torch.Size((*before, self.out_heads, most.head_dim)), torch.Size((*before, self.out_heads))
        if out is not None:
            require_tensor("out", out, shape, dtype, device)
            require_apart("out", out, o=o, lse=lse)
        if merged is not None:
            require_tensor("merged_lse", merged, lse_shape, torch.float32, device)
            require_apart("merged_lse", merged, o=o, lse=lse, out=out)
        entry = self._known.get(o.shape)
        if not entry:
            tokens = before.numel()
            call = (self._calls.get(tokens) or self._choose(tokens)) if tokens else nothing
            sizes = o.nbytes, shape.numel() * dtype.itemsize
            entry = remember(self._known, o.shape, (call, tokens, shape, lse_shape, *sizes, Accepted(), Accepted()))
        if o is original_o and lse is original_lse:
            entry[6].add(o, lse)
        return o, lse, entry

    def _choose(self, tokens: int) -> Call:
        """The call for this number of query tokens, chosen once for each number."""
        most = self._most
        if tokens > most.batch:
            raise UsageError(
                f"o has {tokens} query tokens; it must have at most {most.batch}: give fewer, or a greater max_batch"
            )
        return remember(self._calls, tokens, self._fitting(tokens))

    def extra_repr(self) -> str:
        batch, heads, dim, output, base = self._limits.values()
        sizes = f"heads={heads}, head_dim={dim}, max_batch={batch}, dtype={self._dtype}"
        return f"{sizes}, output={output}, base={base}, ranks={self.world_size}"
