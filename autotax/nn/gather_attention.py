"""Prefill and training attention over sequence shards: each rank's queries attend to the keys and values of all ranks."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.heap.collectives import all_gather, reduce_scatter
from autotax.nn import custom_ops  # noqa: F401 - registers torch.ops.autotax.*
from autotax.nn.base import NO_OUT
from autotax.nn.consensus import DTYPES
from autotax.nn.groups import capturing, on_device
from autotax.nn.sized import remember, several
from autotax.nn.tensor_checks import recorded, require_apart, require_no_tangent, require_recordable, require_tensor, small
from autotax.nn.tuned import Tuned
from autotax.operators.gather_attention import GatherAttention as AttentionProblem
from autotax.operators.gather_attention import Part, Stream
from autotax.spaces.gather_attention import LIBRARIES

KEPT_STREAMS = 8
"""Streams that a module keeps for further layers and for captures, which cannot make them."""


class GatherAttention(Tuned):
    """Attention of a rank's queries to the keys and values of all ranks. One module serves all layers of the same sizes.

    Construction is collective over `group` (None: all ranks, or this process alone).

    - `kv_heads`, `q_heads`, `head_dim`: of K and V, and of Q. `max_seq_len`: the most tokens of a sequence on all ranks together;
      `max_batch`: the most sequences of a call.
    - `causal`: a query sees the keys up to its own position. `layout`: "contiguous", rank r has the r-th part of each sequence;
      or "zigzag", it has chunks r and 2 * ranks - 1 - r of 2 * ranks chunks, in this order, so that all ranks have equal work.
    - `window`: a query sees that many keys at most, its own and the last ones before; 0: all of them. `v_dim`: elements of a head
      of V and of the output, fewer than `head_dim`; 0: as many.
    - `sizes`: lengths of sequences to prepare for, each with its own config; default: `max_seq_len` alone. A call uses the config
      of the next greater length if its kernel can serve fewer tokens, else BSP.
    - `device`, `db`, `conditions`, `config`, `check`, `prove`: see FlashDecode and AllGatherLinear.

    Calls can be captured, once their shapes have been called, and compiled. They allocate their result, and nothing else if a
    kernel of ours runs; torch's attention has workspaces in torch's caching allocator. Raises UsageError on all ranks alike.

    The backward is the vendor's, on keys and values that are gathered again; a reduce-scatter adds up their gradients.
    """

    NAMES = "q", "k", "v"
    _most: AttentionProblem
    _recorders: dict[Problem, Any]
    _streams: dict[tuple[int, ...], tuple[Stream, Tensor]]
    """Some last `lengths`, as this rank attends to them, and the sums of the lengths of its sequences, on the device."""
    _captured: list[Tensor]
    """Sums that captured graphs read."""

    def __init__(
        self,
        kv_heads: int,
        q_heads: int,
        head_dim: int,
        max_seq_len: int,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        max_batch: int = 1,
        causal: bool = True,
        layout: str = "contiguous",
        window: int = 0,
        v_dim: int = 0,
        device: torch.device | str | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        check: bool | None = None,
        prove: bool | float = False,
    ) -> None:
        self._dtype = dtype
        self._shape = max_batch, q_heads, kv_heads, head_dim, "causal" if causal else "none", layout
        self._more = window, 0 if v_dim == head_dim else v_dim
        self._lengths = (*several(sizes or ()), max_seq_len)
        super().__init__((), group, device=device, db=db, conditions=conditions, config=config, check=check, prove=prove)

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_recorders": {}, "_most": None, "_streams": {}, "_captured": []}

    def _prepared_for(self) -> list[Problem]:
        """The problem of each length to prepare for."""
        if self._dtype not in DTYPES:
            raise UsageError(f"dtype is {self._dtype}; allowed are torch.bfloat16 and torch.float16: give one of these")
        batch, q_heads, kv_heads, dim, mask, layout = self._shape
        shape = batch, q_heads, kv_heads, dim
        dtype, world_size, more = DTYPES[self._dtype], self.world_size, self._more
        lengths = dict.fromkeys(self._lengths)
        return [AttentionProblem(*shape, length, dtype, world_size, mask, layout, *more) for length in lengths]

    def _make(self) -> None:
        if self._world is None:
            problems, _ = self._agreed(self._prepared_for, None)
        else:
            super()._make()
            problems = self._prepared_for()
            # The first collective connects the ranks, which does not work during graph capture.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._world.data)
        most = problems[-1]
        assert isinstance(most, AttentionProblem)
        self._most = most

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, *, return_lse: bool = False,
        prefix: tuple[Tensor, Tensor] | None = None, lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """The attention of this rank's queries.

        Args:
            q: [batch, tokens, q_heads, head_dim], this rank's tokens.
            k: [batch, tokens, kv_heads, head_dim].
            v: Like k, with heads of `v_dim` elements.
            out: Where to store the output. Default: a new tensor.
            return_lse: Whether to return log-sum-exps too, natural and with the scale, to merge the output with that of other
                keys. No gradient passes through them. A variant that keeps none runs as the baseline.
            prefix: Keys and values of earlier tokens that every rank holds, [batch, earlier, kv_heads, head_dim].
                All queries see them, or with a window those that it reaches, as queries of a later chunk of a prompt do. The
                vendor attends to them, and one kernel merges both outputs. There is no backward.
            lengths: The lengths of sequences that lie one after the other along the tokens of all ranks: a list, the same on all
                ranks, that adds up to all tokens. The sums of lengths from 0 on, as in `cu_seqlens`, serve as well, and a tensor
                of either, int32 or int64 [any] on the CPU. For a batch of one and the layout "contiguous". No query sees another
                sequence. The vendor's attention serves them, with a backward.

        Returns:
            The output, shaped like q, with heads of `v_dim` elements. With `return_lse` also the log-sum-exps, float32 [batch,
            q_heads, tokens]. Enqueues on the current stream of the module's device.

        Raises:
            UsageError: A tensor or `lengths` is not allowed; nothing is enqueued.
        """
        if lengths is not None:
            lengths = _lengths_of(lengths)
            if out is not None or prefix is not None:
                raise UsageError("lengths is given with out or prefix; it takes neither: leave it out")
        if prefix is not None:
            if out is not None or (is_grad_enabled() and recorded(q, k, v, *prefix)):
                raise UsageError("prefix is given with out or with gradients; it takes neither: leave it out, or use no_grad")
            if is_compiling():
                both = torch.ops.autotax.gather_attention_behind(q, k, v, *prefix, self.handle)
            else:
                both = self.run_behind(q, k, v, *prefix)
            return tuple(both) if return_lse else both[0]
        recording = is_grad_enabled() and recorded(q, k, v, out)
        if recording or return_lse or lengths is not None:
            if out is not None:
                raise UsageError(NO_OUT if recording else "out is given with return_lse, which makes both results: leave one out")
            if recording and not is_compiling():
                require_recordable(q=q, k=k, v=v)
                require_no_tangent(q, k, v)
                _require_lengths(lengths)  # torch would refuse them in many lines
            if recording or is_compiling():
                both = torch.ops.autotax.gather_attention_recorded(q, k, v, lengths, self.handle)
            else:
                both = self.run_recorded(q, k, v, lengths=lengths)
            return tuple(both) if return_lse else both[0]
        if not is_compiling():
            return self.run(q, k, v, out)
        if out is None:
            return torch.ops.autotax.gather_attention(q, k, v, self.handle)
        torch.ops.autotax.gather_attention_out(q, k, v, out, self.handle)
        return out

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """The body of `forward`; for the operators of torch.ops."""
        self._compare_calls(q, k, v, out)
        problem, inputs = self._problem_of(q, k, v)
        if self._world is None or not len(inputs[0]):
            return self._alone(problem, inputs, out)
        return self._call(*self._calls.get(problem) or self._choose(problem), inputs, out)

    def _compare_calls(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
        """See Module._compare."""
        self._ensure_ready()
        if self._guards[2]:

            def described() -> str:
                problem, inputs = self._problem_of(q, k, v)
                return self._described(problem, inputs, out) if len(inputs[0]) else "no sequences"

            self._compare(described)

    def run_recorded(self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """The output and its log-sum-exps, float32 [batch, q_heads, tokens]."""
        if lengths is not None:
            return self._run_ragged(q, k, v, lengths)
        self._compare_calls(q, k, v, None)
        problem, inputs = self._problem_of(q, k, v)
        if self._world is None or not len(inputs[0]):
            return self._attended(problem, inputs)
        chosen, like = self._calls.get(problem) or self._choose(problem)
        kernel = self._recorders.get(problem) or remember(self._recorders, problem, self._recorder(problem, chosen))
        o = self._call(kernel, like, inputs, None)
        return o, kernel.lse.clone(memory_format=torch.contiguous_format)

    def run_behind(self, q: Tensor, k: Tensor, v: Tensor, earlier_k: Tensor, earlier_v: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exps of queries that see earlier keys too. `run_recorded` is the part that ranks share."""
        from autotax.kernels.gather_attention.vendor import VendorAttention, attend_part  # brings Triton

        (problem, (queries, _, _)), device = self._problem_of(q, k, v), self._device
        shape = len(queries), earlier_k.shape[1] if earlier_k.dim() == 4 else 0, problem.kv_heads
        keys, values = small("prefix k", earlier_k, self._dtype, device), small("prefix v", earlier_v, self._dtype, device)
        require_tensor("prefix k", keys, (*shape, problem.head_dim), self._dtype, device)
        require_tensor("prefix v", values, (*shape, problem.value_dim), self._dtype, device)
        whole = self.run_recorded(q, k, v)
        parts = problem.parts_of_prefix(self._world.rank if self._world else 0, shape[1]) if shape[0] and shape[1] else []
        if self._world is None:
            for part in parts:
                _merge(whole, attend_part(self._library, part, queries, keys, values), slice(*part.queries))
            return whole
        vendor = next(kernel for made in self._kernels.values() for kernel in made if isinstance(kernel, VendorAttention))
        with on_device(self._guards[1]), self._guards[0]:
            for part in parts:
                whole = vendor.part(part, queries, keys, values, whole)
        return whole

    def _run_ragged(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exps of sequences of these lengths, one after the other along the tokens of all ranks."""
        from autotax.kernels.gather_attention.vendor import Bsp, attend_ragged  # brings Triton

        self._ensure_ready()
        if self._guards[2]:
            self._compare(lambda: f"{self._stream_of(q, k, v, lengths)[0].key} in sequences of {list(lengths)}")
        problem, inputs = self._stream_of(q, k, v, lengths)
        stream, ends = self._stream(problem, tuple(lengths))
        if self._world is None:
            o, lse = attend_ragged(self._libraries[-1], *inputs, stream.own, ends, problem.everything)
            return o, lse.contiguous()
        baselines = (kernel for made in self._kernels.values() for kernel in made if isinstance(kernel, Bsp))
        baseline = next(fit for kernel in baselines if (fit := self._fitted(kernel, problem)))
        with on_device(self._guards[1]), self._guards[0]:
            o, lse = baseline.stream(*inputs, stream, ends)
        return o, lse.contiguous()

    def _stream(self, problem: AttentionProblem, lengths: tuple[int, ...]) -> tuple[Stream, Tensor]:
        """A stream as this rank attends to it, and the sums of its sequences' lengths, from 0 on, int32 on the device."""
        if lengths not in self._streams:
            stream = problem.stream(self._world.rank if self._world else 0, lengths)
            ends = torch.tensor([0, *accumulate(stream.own)], dtype=torch.int32, device=self._device)
            self._streams = dict([*self._streams.items()][1 - KEPT_STREAMS :]) | {lengths: (stream, ends)}
        if capturing(self._device):
            self._captured.append(self._streams[lengths][1])
        return self._streams[lengths]

    def _stream_of(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]
    ) -> tuple[AttentionProblem, tuple[Tensor, Tensor, Tensor]]:
        """The problem of a call with `lengths`, and its tensors as kernels take them. Raises UsageError."""
        problem, inputs = self._problem_of(q, k, v)
        if len(inputs[0]) != 1 or problem.layout != "contiguous":
            raise UsageError(
                f"lengths is given with a batch of {len(inputs[0])} and the layout {problem.layout}; it takes a batch of 1 and "
                "the layout contiguous: give such tensors, to such a module"
            )
        _require_lengths(lengths, problem.seq_len)
        return problem, inputs

    def gradients(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v. K and V are gathered again, and their gradients of all ranks are added up.

        Args:
            d_o: The gradient of o, shaped like it.
            q, k, v, lengths: As `forward` takes them.
            o: The output, [batch, tokens, q_heads, value_dim].
            lse: The log-sum-exps, float32 [batch, q_heads, tokens].

        Returns:
            The gradients, shaped like q, k and v, of the sum of all ranks' losses.
        """
        problem, (q, k, v) = self._problem_of(q, k, v)
        if not len(q):
            return q.clone(), k.clone(), v.clone()
        d_o, world, rank = d_o.contiguous(), self._world, self._world.rank if self._world else 0
        library = self._library
        parts = problem.parts(rank)
        if lengths is not None:
            stream, parts = self._parts_of_stream(problem, tuple(lengths))
            library, world = self._libraries[-1], world if stream.crosses else None
        own = torch.cat((k.flatten(), v.flatten()))
        gathered, first = own[None], rank  # the keys of this rank alone
        with on_device(self._guards[1]), self._guards[0]:
            if world is not None:
                gathered, first = own.new_empty(problem.world_size, len(own)), 0
                all_gather(gathered, own, world.data)
            sums, d_q = torch.zeros_like(gathered), torch.zeros_like(q)
            halves, sums_of_halves = (
                [half.view(-1, *like.shape) for half, like in zip(flat.split([k.numel(), v.numel()], 1), (k, v), strict=True)]
                for flat in (gathered, sums)
            )
            for part in parts:
                queries, keys, source = slice(*part.queries), slice(*part.keys), part.source - first
                of_source, values = (half[source] for half in halves)
                of_queries, *of_keys = _backward(library, part, d_o, q, of_source, values, o, lse)
                d_q[:, queries] += of_queries
                for total, of_part in zip(sums_of_halves, of_keys, strict=True):
                    total[source, :, keys] += of_part
            if world is None:
                own = sums[0]
            else:
                reduce_scatter(own, sums.view(-1), world.data)
        d_k, d_v = own.split([k.numel(), v.numel()])
        return d_q, d_k.view(k.shape).clone(), d_v.view(v.shape).clone()

    def _parts_of_stream(self, problem: AttentionProblem, lengths: tuple[int, ...]) -> tuple[Stream, list[Part]]:
        """A stream as this rank attends to it, and its parts for the backward: one for each of the rank's own sequences first."""
        stream, _ = self._stream(problem, lengths)
        how = problem.everything._replace(source=self._world.rank if self._world else 0)
        own = [how._replace(queries=tokens, keys=tokens) for tokens in pairwise(accumulate(stream.own, initial=0))]
        return stream, [*own, *stream.parts]

    def _recorder(self, problem: AttentionProblem, chosen: Any) -> Any:
        """The kernel for calls that torch records: the chosen one if it has log-sum-exps, else the baseline."""
        if chosen.KEEPS_LSE:
            return chosen
        kernels = (kernel for made in self._kernels.values() for kernel in made if kernel.KEEPS_LSE)
        return next(fit for kernel in kernels if (fit := self._fitted(kernel, problem)))

    def _problem_of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionProblem, tuple[Tensor, Tensor, Tensor]]:
        """The problem of a call, for a batch of none that of one, and its tensors as kernels take them. Raises UsageError."""
        self._ensure_ready()
        require_no_tangent(q, k, v)
        most, device = self._most, self._device
        q, k, v = (small(name, tensor, self._dtype, device) for name, tensor in zip(self.NAMES, (q, k, v), strict=True))
        if q.dim() != 4:
            raise UsageError(f"q has {q.dim()} dimensions; it must be [batch, tokens, q_heads, head_dim]: give such a tensor")
        batch, tokens = q.shape[:2]
        if batch > most.batch or tokens > most.shard_len:
            raise UsageError(
                f"q is {list(q.shape)}; it must have at most {most.batch} sequences of {most.shard_len} tokens on a rank: "
                "give fewer, or make the module with a greater max_batch or max_seq_len"
            )
        if not tokens or tokens % most.chunks:
            raise UsageError(
                f"q has {tokens} tokens on a rank; with the layout {most.layout} it must have a multiple of {most.chunks}, "
                f"{most.chunks} at least: give such a tensor"
            )
        problem = replace(most, batch=max(batch, 1), seq_len=tokens * most.world_size)
        heads = (most.q_heads, most.head_dim), (most.kv_heads, most.head_dim), (most.kv_heads, most.value_dim)
        for name, tensor, of_token in zip(self.NAMES, (q, k, v), heads, strict=True):
            require_tensor(name, tensor, (batch, tokens, *of_token), self._dtype, device)
        return problem, (q, k, v)

    def _alone(self, problem: AttentionProblem, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor | None) -> Tensor:
        """The output of `_attended`, in `out` if that is given."""
        o, _ = self._attended(problem, inputs)
        if out is None:
            return o
        require_tensor("out", out, tuple(o.shape), self._dtype, self._device)
        require_apart("out", out, q=inputs[0], k=inputs[1], v=inputs[2])
        return out.copy_(o)

    def _attended(self, problem: AttentionProblem, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The output and its log-sum-exps where no other rank takes part: of one rank, or of an empty batch."""
        q, _, v = inputs
        if not len(q):
            return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(0, q.shape[2], q.shape[1], dtype=torch.float32)
        from autotax.kernels.gather_attention.vendor import attend_part  # brings Triton

        o, lse = attend_part(self._library, problem.everything, *inputs)
        return o, lse.contiguous()

    def extra_repr(self) -> str:
        batch, q_heads, kv_heads, dim, mask, layout = self._shape
        sizes = f"kv_heads={kv_heads}, q_heads={q_heads}, head_dim={dim}, max_seq_len={self._lengths[-1]}, max_batch={batch}"
        unusual = "".join(f", {name}={value}" for name, value in zip(("window", "v_dim"), self._more, strict=True) if value)
        return f"{sizes}, dtype={self._dtype}, causal={mask == 'causal'}, layout={layout}{unusual}, ranks={self.world_size}"

    @property
    def _libraries(self) -> list[str]:
        """Whose attention there is; the last one has windows and takes sequences of any lengths."""
        on_amd = torch.version.hip is not None
        return [str(name) for name in LIBRARIES["cpu" if self._device.type == "cpu" else "rocm" if on_amd else "cuda"]]

    @property
    def _library(self) -> str:
        """Whose attention the backward uses, and one rank alone."""
        return self._libraries[-1 if self._most.window else 0]


def _lengths_of(lengths: Sequence[int] | Tensor) -> Sequence[int]:
    """Lengths of sequences from themselves or from their sums, which begin with 0. Raises UsageError for a tensor of a GPU."""
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu" or lengths.dim() != 1:
            raise UsageError(
                f"lengths is a tensor {list(lengths.shape)} on {lengths.device}; it must be a list or a tensor [any] on the "
                "CPU: give lengths.tolist()"
            )
        lengths = lengths.tolist()
    if isinstance(lengths, Sequence) and len(lengths) > 1 and lengths[0] == 0:
        return [end - first for first, end in pairwise(lengths)]
    return lengths


def _require_lengths(lengths: Sequence[int] | None, tokens: int | None = None) -> None:
    """Raises UsageError unless `lengths` is a list of lengths, which add up to `tokens` if that is given; None passes."""
    if lengths is None:
        return
    whole = isinstance(lengths, Sequence) and all(isinstance(length, int) and length > 0 for length in lengths)
    if not whole or tokens not in (None, sum(lengths)):
        raise UsageError(
            f"lengths is {reprlib.repr(lengths)}; it must be a list of whole numbers from 1 on that add up to the "
            f"{f'{tokens} ' if tokens else ''}tokens of all ranks: give such a list, or their sums from 0 on"
        )


def _merge(whole: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], queries: slice) -> None:
    """Adds the output and log-sum-exps of some queries for more keys to those of all queries."""
    o, lse = whole[0][:, queries], whole[1][:, :, queries]
    total = torch.logaddexp(lse, more[1])
    of_whole, of_more = (part * (sums - total).exp().transpose(1, 2)[..., None] for part, sums in ((o, lse), more))
    o.copy_(of_whole + of_more)
    lse.copy_(total)


def _backward(
    library: str, part: Part, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a part's queries, keys and values by the vendor's backward; `o` and `lse` are those of all keys."""
    from autotax.kernels.gather_attention.vendor import bounds, cut, masked, widened  # brings Triton

    queries, keys, pieces, dim = slice(*part.queries), slice(*part.keys), part.pieces, v.shape[3]
    k, v = k[:, keys], v[:, keys]
    shapes = q[:, queries].shape, k.shape, v.shape
    d_o, q, k, v, o = cut(pieces, d_o[:, queries], q[:, queries], k, v, o[:, queries])
    lse = lse[:, :, queries].unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1).contiguous()
    if library == "cudnn" and dim < q.shape[3]:
        library = "flash"  # not every version of cuDNN has a backward for such heads
    if library != "cudnn":
        d_o, v, o = (widened(tensor, q.shape[3]) for tensor in (d_o, v, o))
    nothing, aten = lse.new_zeros(2, dtype=torch.int64), torch.ops.aten
    sizes = None, None, q.shape[1], k.shape[1], 0.0, part.causal
    if library == "flash" and part.left is not None:
        operands = d_o, q, k, v, o, lse, *sizes, nothing, nothing[0]
        gradients = aten._flash_attention_backward(*operands, **bounds(part.causal, part.left))
    else:
        d_o, q, k, v, o = (tensor.transpose(1, 2) for tensor in (d_o, q, k, v, o))
        if library == "cudnn":
            options = nothing[0], nothing[1], None, *sizes
            gradients = aten._scaled_dot_product_cudnn_attention_backward(d_o, q, k, v, o, lse[..., None], *options)
        elif library == "flash":
            gradients = aten._scaled_dot_product_flash_attention_backward(d_o, q, k, v, o, lse, *sizes, nothing, nothing[0])
        else:
            how = {"is_causal": False} | masked(q, k, part.causal, part.left)
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(d_o, q, k, v, o, lse, 0.0, **how)
        gradients = (gradient.transpose(1, 2) for gradient in gradients)
    d_q, d_k, d_v = gradients
    return d_q.reshape(shapes[0]), d_k.reshape(shapes[1]), d_v[..., :dim].reshape(shapes[2])
