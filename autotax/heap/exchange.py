"""Values that ranks exchange: msgpack of a bounded size, decoded as a declared type. Bytes of a peer are never executed or
unpickled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.errors import MachineError

LARGEST = 2**24
"""Bytes of one rank's value."""
FIRST = 504
"""Bytes of a value that travel with its size, so that a short value takes one collective."""
SIZE = 8
REFUSED = -1
"""Replaces the size if a rank could not encode its value."""


def gather(value: Any, kind: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Collective.

    Args:
        value: the value of this rank.
        kind: its type, as msgspec knows types; the same on all ranks.
        group: the ranks.
        device: the device of the tensors that the group's collectives take.

    Raises:
        MachineError: on all ranks alike; a value is too large or not of its type.
    """
    cause = None
    try:
        data = msgspec.msgpack.encode(value)
        size = len(data)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        data, size, cause = b"", REFUSED, error
    heads = _all(size.to_bytes(SIZE, "little", signed=True) + data[:FIRST], SIZE + FIRST, group, device)
    sizes = [int.from_bytes(head[:SIZE], "little", signed=True) for head in heads]
    for rank, length in enumerate(sizes):
        if length == REFUSED:
            raise MachineError(f"rank {rank} cannot encode what it tells the others; it must be a {_name(kind)}") from cause
        if not 0 <= length <= LARGEST:
            raise MachineError(f"rank {rank} tells the others {length} bytes; at most {LARGEST} are taken")
    rests = [b""] * len(heads)
    if (longest := max(sizes)) > FIRST:
        rests = _all(data[FIRST:], longest - FIRST, group, device)
    return [
        _decoded(rank, (head[SIZE:] + rest)[:size], kind)
        for rank, (head, rest, size) in enumerate(zip(heads, rests, sizes, strict=True))
    ]


def _all(data: bytes, width: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """The bytes of every rank, filled up to `width` (at most that, unless the exchange is refused anyway)."""
    mine = torch.frombuffer(bytearray(data[:width].ljust(width, b"\0")), dtype=torch.uint8).to(device)
    everybody: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return [buffer.cpu().numpy().tobytes() for buffer in everybody]


def _decoded(rank: int, data: bytes, kind: Any) -> Any:
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MachineError(f"what rank {rank} tells the others is no {_name(kind)} ({error})") from None


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
