"""Device timestamps: show where the programs of a kernel wait and send on an NVIDIA GPU.

While `stamping` is on, Triton compiles kernels with instructions that write down the time. These instructions stand at the begin
and the end of each program and of each role of its warps (warp specialisation). They also stand around each call of a device
function that waits or sends, and around waits of roles for each other. Sources of kernels are not changed. The first lane of each
warp writes its own record, so warps neither share data nor wait. A stamped kernel is slower than the normal one.

The clock is PTX's %globaltimer, in nanoseconds; its resolution depends on the GPU.
"""

from __future__ import annotations

import ast
import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.jit import JITFunction

RECORDS = 1 << 20
"""Most records of a call. Later ones are only counted."""
OPERANDS = "full", "empty"
"""Ends of the names of barriers of operand buffers. Waits for them are not recorded: they come with each block of K."""
RECORD = 4
"""Words of 8 bytes: the time; program and warp; code and processor; one that is free. The header is as long."""
# $0 is the result that Triton requires of an inline assembly expression. The first word of the header counts the records.
STAMP = """{{
.reg .pred first, room;
.reg .b32 lane, slot, program, part, of, warp, code, processor;
.reg .b64 place, clock, start;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.b64 start, {address};
mov.b32 slot, {records};
mov.u64 clock, %globaltimer;
@first atom.global.add.u32 slot, [start], 1;
setp.lt.u32 room, slot, {records};
mov.u32 program, %ctaid.z;
mov.u32 of, %nctaid.y;
mov.u32 part, %ctaid.y;
mad.lo.u32 program, program, of, part;
mov.u32 of, %nctaid.x;
mov.u32 part, %ctaid.x;
mad.lo.u32 program, program, of, part;
mov.u32 warp, %tid.x;
shr.u32 warp, warp, 5;
mov.u32 processor, %smid;
mov.b32 code, {code};
mad.wide.u32 place, slot, 32, start;
@room st.global.u64 [place+32], clock;
@room st.global.v2.b32 [place+40], {{program, warp}};
@room st.global.v2.b32 [place+48], {{code, processor}};
mov.u32 $0, 0;
}}"""


@dataclass(frozen=True)
class Mark:
    """The meaning of the code in a record."""

    kernel: str
    function: str
    """Empty for the program itself."""
    ends: bool
    role: bool = False
    """Whether the function is the whole work of some warps of a program."""


@dataclass(frozen=True)
class Span:
    """A program of a kernel, or a device function in it, on one warp. Nanoseconds of the device's clock."""

    kernel: str
    function: str
    program: int
    warp: int
    processor: int
    begin_ns: int
    end_ns: int
    role: bool = False


class Stamps:
    """The records of one GPU, and the meaning of their codes."""

    def __init__(self, device: torch.device, records: int = RECORDS) -> None:
        self.marks: list[Mark] = []
        self.records = records
        self.words = torch.zeros((records + 1, RECORD), dtype=torch.int64, device=device)

    def asm(self, mark: Mark) -> str:
        """The instructions that write a record of this mark."""
        if mark not in self.marks:
            self.marks.append(mark)
        return STAMP.format(address=self.words.data_ptr(), records=self.records, code=self.marks.index(mark))

    def clear(self) -> None:
        """Forgets the records so far, on the current stream."""
        self.words[0].zero_()

    def spans(self) -> tuple[list[Span], int]:
        """The recorded spans, and the number of records that did not fit. Waits for the device."""
        count = int(self.words[0, 0])
        rows = self.words[1 : 1 + min(count, self.records)].cpu()
        return spans_of(rows, self.marks), max(0, count - self.records)


def spans_of(rows: torch.Tensor, marks: Sequence[Mark]) -> list[Span]:
    """Converts records [count, RECORD] to spans, sorted by their begins. Warps of a program with equal spans count once."""
    halves = rows.contiguous().view(torch.int32).view(-1, 2 * RECORD).tolist()
    warps: dict[tuple[str, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for time, (_, _, program, warp, code, processor, *_) in zip(rows[:, 0].tolist(), halves, strict=True):
        warps[marks[code].kernel, program, warp].append((time, code, processor))
    spans: list[Span] = []
    seen: set[tuple[object, ...]] = set()
    for (kernel, program, warp), records in sorted(warps.items()):
        records.sort(key=lambda record: record[0])
        way = (kernel, program, *(code for _, code, _ in records))
        if way in seen:
            continue
        seen.add(way)
        begun: list[tuple[Mark, int]] = []
        for time, code, processor in records:
            mark = marks[code]
            if not mark.ends:
                begun.append((mark, time))
            elif begun and replace(begun[-1][0], ends=True) == mark:  # else records were lost
                spans.append(Span(kernel, mark.function, program, warp, processor, begun.pop()[1], time, mark.role))
    return sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns))


def waited_for(call: ast.Call) -> str:
    """Returns the name of a slice for a call that waits for a barrier or for TMA's stores. Empty for other calls."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="tma"), attr="store_wait")):
            return "wait for stores"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="mbarrier"), attr="wait"), args=[barrier, *_]):
            name = ast.unparse(barrier).partition(".")[0]
            return "" if name.endswith(OPERANDS) else f"wait for {name}"
    return ""


def forget_compiled() -> None:
    """Makes this process compile each kernel again, or read it from Triton's cache, at its next launch."""
    for item in gc.get_objects():
        if issubclass(type(item), JITFunction):
            item.device_caches.clear()


@contextmanager
def stamping(stamps: Stamps, chosen: Callable[[str], bool]) -> Iterator[None]:
    """Stamps kernels launched inside: their roles, and calls of `chosen` device functions. Triton's cache stays as it was."""
    patched: Any = CodeGenerator
    names = "call_JitFunction", "visit_Call", "visit_compound_statement", "visit_Return"
    originals = {name: getattr(CodeGenerator, name) for name in names}
    usual_call, usual_builtin, usual_body, usual_return = originals.values()
    kernel = ""
    roles: set[str] = set()

    def stamp(generator: Any, function: str, ends: bool, role: bool = False) -> None:
        asm = stamps.asm(Mark(kernel, function, ends, role))
        tl.inline_asm_elementwise(
            asm, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=generator.semantic
        )  # fmt: skip

    def within_another(generator: Any) -> bool:
        """Whether the caller is a chosen function itself, whose calls are a part of its slice."""
        caller = generator.jit_fn.__name__
        return chosen(caller) and not generator.is_kernel and caller not in roles

    def between(generator: Any, name: str, work: Callable[[], Any], role: bool = False) -> Any:
        stamp(generator, name, False, role)
        result = work()
        stamp(generator, name, True, role)
        return result

    def call(generator: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        name, work = function.__name__, partial(usual_call, generator, function, *args, **kwargs)
        role = kwargs.get("caller_context") is not None  # only warps of a role have a separate caller context
        if role:
            roles.add(name)
        elif not chosen(name) or within_another(generator):
            return work()
        return between(generator, name, work, role)

    def builtin(generator: Any, node: ast.Call) -> Any:
        name, work = waited_for(node), partial(usual_builtin, generator, node)
        return between(generator, name, work) if name and not within_another(generator) else work()

    def body(generator: Any, statements: Any) -> Any:
        nonlocal kernel
        if not generator.is_kernel or hasattr(generator, "_autotax_stamped"):
            return usual_body(generator, statements)
        generator._autotax_stamped = True
        kernel = generator.jit_fn.__name__
        stamp(generator, "", False)
        usual_body(generator, statements)
        stamp(generator, "", True)
        return None

    def leave(generator: Any, node: Any) -> Any:
        if generator.is_kernel:
            stamp(generator, "", True)
        return usual_return(generator, node)

    for name, function in zip(names, (call, builtin, body, leave), strict=True):
        setattr(patched, name, function)
    forget_compiled()
    try:
        with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
            triton.knobs.cache.dir = cache
            yield
    finally:
        for name, function in originals.items():
            setattr(patched, name, function)
        forget_compiled()
