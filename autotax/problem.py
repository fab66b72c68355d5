"""WHAT is computed: the shapes, types and sharding of one distributed operator, without a word on how.

A problem is a frozen value that checks itself; its `key` is its canonical name in databases and on the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from autotax.errors import UsageError

ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_WORLD_SIZE = 64
_MAX_SIZE = 2**31 - 1
OUTPUTS = ("replicated", "head_scatter")
PAGES = (0, 16, 64)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def _require_size(name: str, value: object, most: int = _MAX_SIZE) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        option = "--" + name.replace("_", "-")
        raise UsageError(f"{name} is {value!r}; it must be a whole number from 1 to {most}: give another {option}")


def _require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; allowed are {', '.join(allowed)}: give one of these as --{name}")


def _option(default: Any) -> Any:
    """A field that came later: at its default it is left out of keys, so that those of older databases still hold."""
    return field(default=default, metadata={"unnamed": default})


def _is_named(of: Field[Any], value: object) -> bool:
    return "unnamed" not in of.metadata or value != of.metadata["unnamed"]


@dataclass(frozen=True)
class Problem(ABC):
    """The base of all operators. Subclasses name their operator in `op` and check their sizes in `__post_init__`."""

    op: ClassVar[str]

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Element type of inputs and output: a key of ITEM_SIZES."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks that take part."""

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the inputs and the output of one rank."""

    @cached_property
    def key(self) -> str:
        """Canonical name, for instance `all-gather-gemm/m=512,n=7168,k=8192,dtype=bf16,shard=m,world_size=4`."""
        return f"{self.op}/" + ",".join(f"{name}={value}" for name, value in self.to_dict().items() if name != "op")

    def to_dict(self) -> dict[str, Any]:
        """The problem as plain values, the operator's name first; an `_option` only where it is not at its default."""
        return {"op": self.op} | {f.name: value for f in fields(self) if _is_named(f, value := getattr(self, f.name))}

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True)
class AllGatherGemm(Problem):
    """C = gather(A) @ B.T over `world_size` ranks; every rank computes C [m, n] from its own B.

    - `shard="m"`: rank r holds rows r*R ... of A, R = ceil(m / world_size), as [R, k] (rows past m are padding that no
      rank reads into C), and its own B [n, k]: the column-parallel linear layer with sequence parallelism.
    - `shard="k"`: rank r holds columns r*k/world_size ... of A as [m, k/world_size], and B [n, k].

    `n` is the number of columns of C on each rank.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    shard: str = "m"
    world_size: int = 1

    op: ClassVar[str] = "all-gather-gemm"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            _require_size(name, getattr(self, name))
        _require_size("world_size", self.world_size, MAX_WORLD_SIZE)
        _require_choice("dtype", self.dtype, tuple(ITEM_SIZES))
        _require_choice("shard", self.shard, ("m", "k"))
        if self.shard == "k" and self.k % self.world_size:
            raise UsageError(
                f"k is {self.k} on {self.world_size} ranks; with --shard k it must be a multiple of the world size: "
                f"pad k to {ceil_div(self.k, self.world_size) * self.world_size}"
            )

    @property
    def nbytes(self) -> int:
        """See Problem.nbytes."""
        return (self.shard_rows * self.shard_cols + self.n * self.k + self.m * self.n) * self.item_size

    @property
    def shard_rows(self) -> int:
        """Rows of A that one rank holds."""
        return ceil_div(self.m, self.world_size) if self.shard == "m" else self.m

    @property
    def shard_cols(self) -> int:
        """Columns of A that one rank holds."""
        return self.k if self.shard == "m" else self.k // self.world_size


@dataclass(frozen=True)
class FlashDecode(Problem):
    """Attention of one query token per sequence over a KV cache sharded along the sequence.

    q [batch, q_heads, head_dim]; K and V [batch, kv_heads, S, head_dim] on each rank, S = ceil(kv_len / world_size);
    lengths int32 [batch]: how many of its S tokens a rank really holds of each sequence (0 is allowed).
    `kv_len` is the greatest length over all ranks. Each KV head serves q_heads / kv_heads query heads.

    - `output="replicated"`: every rank gets the whole output [batch, q_heads, head_dim].
    - `output="head_scatter"`: rank r gets heads r*H ... r*H + H - 1, H = q_heads / world_size, as [batch, H, head_dim]: what
      an output projection that is sharded by rows takes.

    With `page` tokens (16 or 64) the cache is paged as serving engines hold it: K and V on each rank are pools
    [pages, page, kv_heads, head_dim], and a block table int32 [batch, ceil(S / page)] says which pages a sequence has, in the
    order of its tokens. Sequences may share pages; entries beyond a sequence's length are never read.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_len: int
    dtype: str = "bf16"
    world_size: int = 1
    output: str = _option("replicated")
    page: int = _option(0)

    op: ClassVar[str] = "flash-decode"

    def __post_init__(self) -> None:
        _require_size("batch", self.batch, 65535)
        for name in ("q_heads", "kv_heads"):
            _require_size(name, getattr(self, name), 4096)
        _require_size("head_dim", self.head_dim, 256)
        _require_size("kv_len", self.kv_len)
        _require_size("world_size", self.world_size, MAX_WORLD_SIZE)
        _require_choice("dtype", self.dtype, tuple(ITEM_SIZES))
        if self.q_heads % self.kv_heads:
            raise UsageError(
                f"q_heads is {self.q_heads} and kv_heads {self.kv_heads}; q_heads must be a multiple of kv_heads: "
                "give another --q-heads or --kv-heads"
            )
        _require_choice("output", self.output, OUTPUTS)
        if self.output == "head_scatter" and self.q_heads % self.world_size:
            raise UsageError(
                f"q_heads is {self.q_heads} on {self.world_size} ranks; with --output head_scatter it must be a multiple of the "
                "world size: give another --q-heads or --world-size, or --output replicated"
            )
        if type(self.page) is not int or self.page not in PAGES:
            raise UsageError(f"page is {self.page!r}; allowed are 0 (contiguous), 16, 64: give one of these as --page")

    @property
    def nbytes(self) -> int:
        """See Problem.nbytes."""
        tokens = self.pages * self.page or self.shard_len
        rows = self.batch * (self.q_heads + self.out_heads + 2 * self.kv_heads * tokens)
        return rows * self.head_dim * self.item_size

    @property
    def shard_len(self) -> int:
        """Tokens of each sequence that one rank has room for."""
        return ceil_div(self.kv_len, self.world_size)

    @property
    def pages(self) -> int:
        """Pages that a rank has for each sequence: the columns of the block table; 0 where the cache is contiguous."""
        return ceil_div(self.shard_len, self.page) if self.page else 0

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """K or V on one rank, without pages that no sequence has."""
        if self.page:
            return self.batch * self.pages, self.page, self.kv_heads, self.head_dim
        return self.batch, self.kv_heads, self.shard_len, self.head_dim

    @property
    def out_heads(self) -> int:
        """Query heads of which a rank gets the output."""
        return self.q_heads if self.output == "replicated" else self.q_heads // self.world_size

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads


OPERATORS: dict[str, type[Problem]] = {cls.op: cls for cls in (AllGatherGemm, FlashDecode)}


def problem_from_dict(values: dict[str, Any]) -> Problem:
    """The inverse of `Problem.to_dict`; raises UsageError on an unknown operator or field."""
    op = values.get("op")
    if not isinstance(op, str) or op not in OPERATORS:
        raise UsageError(f"op is {op!r}; allowed are {', '.join(OPERATORS)}: name one of these")
    cls = OPERATORS[op]
    given = {name: value for name, value in values.items() if name != "op"}
    allowed = [f.name for f in fields(cls)]
    if unknown := sorted(set(given) - set(allowed)):
        raise UsageError(f"{op} has no {', '.join(unknown)}; it takes {', '.join(allowed)}: take the others out")
    try:
        return cls(**given)
    except TypeError as error:
        raise UsageError(f"{op} takes {', '.join(allowed)}; {str(error).split('__init__() ')[-1]}: give them all") from None


def with_world_size(problem: Problem, world_size: int) -> Problem:
    """The same problem on another number of ranks."""
    return replace(problem, world_size=world_size)  # type: ignore[call-arg]
