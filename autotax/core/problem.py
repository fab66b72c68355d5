"""Problems: the shapes, types and sharding of one distributed operator. A problem does not say how it is computed.

A problem is a frozen value that checks itself; its `key` is its canonical name in databases and on the command line. Operators
declare their fields by `size`, `choice`, `dtype` and `ranks`, which define the meaning of a field: a size that may vary from call
to call, a choice, the dtype, the ranks. Options, files, keys and look-ups follow from these declarations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from autotax.core.errors import UsageError

P = TypeVar("P", bound="Problem")

ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}
WHOLE_TYPES = ("bf16", "fp16", "fp32")
"""Types that need no scales."""
MAX_WORLD_SIZE = 64
_MAX_SIZE = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def busy_share(items: int, processors: int) -> float:
    """The share of its time that a processor is busy with equal items, which all processors take in waves."""
    return items / (ceil_div(items, processors) * processors)


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


# The fields of a problem


def size(
    about: str,
    *,
    least: int = 1,
    most: int = _MAX_SIZE,
    varying: bool = False,
    default: Any = MISSING,
    unnamed: bool = False,
) -> Any:
    """A whole number. A model changes `varying` sizes from call to call; others are its architecture. `unnamed`: see `choice`."""
    metadata = {"about": about, "least": least, "most": most, "varying": varying}
    return field(default=default, metadata=metadata | ({"unnamed": default} if unnamed else {}))


def choice(about: str, allowed: tuple[Any, ...], *, default: Any = MISSING, unnamed: bool = False, spelled: str = "") -> Any:
    """One of `allowed`, all of one type. An `unnamed` field came later: at its default it is left out of keys, so that keys of
    older databases still hold. `spelled` lists the allowed values for messages.
    """
    metadata: dict[str, Any] = {"about": about, "allowed": allowed, "spelled": spelled or ", ".join(map(str, allowed))}
    return field(default=default, metadata=metadata | ({"unnamed": default} if unnamed else {}))


def dtype(default: str = "bf16", allowed: tuple[str, ...] = WHOLE_TYPES) -> Any:
    """The element type of inputs and output."""
    return choice(f"{', '.join(allowed[:-1])} or {allowed[-1]}", allowed, default=default)


def ranks() -> Any:
    """The number of ranks."""
    return size("ranks", most=MAX_WORLD_SIZE, default=1)


def about(of: Field[Any]) -> str:
    """The meaning of a field, in a few words."""
    return str(of.metadata.get("about", ""))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(of: Field[Any], value: object) -> None:
    """Raises UsageError for a value that the field does not allow."""
    if "allowed" in of.metadata:
        allowed = of.metadata["allowed"]
        if type(value) is not type(allowed[0]) or value not in allowed:
            spelled = of.metadata["spelled"]
            raise UsageError(f"{of.name} is {value!r}; allowed are {spelled}: give one of these as {_option(of.name)}")
    elif "most" in of.metadata:
        least, most = of.metadata["least"], of.metadata["most"]
        if type(value) is not int or not least <= value <= most:
            raise UsageError(
                f"{of.name} is {value!r}; it must be a whole number from {least} to {most}: give another {_option(of.name)}"
            )


@dataclass(frozen=True)
class Problem(ABC):
    """The base of all operators. A subclass names its operator in `op`, declares its fields and may add checks to `check`.

    Sizes that follow from the fields are cached properties, because kernels read them in each call.
    """

    op: ClassVar[str]
    measure: ClassVar[Callable[[Any], int]] = staticmethod(lambda _: 1)
    """The bytes of the drawn tensors of a problem; the operator's declaration sets it."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check(entry, getattr(self, entry.name))
        self.check()

    def check(self) -> None:  # noqa: B027 - most operators have nothing to add
        """Raises UsageError for fields that contradict each other. Each field has been checked by itself before."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Element type of inputs and output: a key of ITEM_SIZES."""

    @property
    def out_dtype(self) -> str:
        """The type by whose rounding outputs are judged: a key of `autotax.operators.verification.TOLERANCE`."""
        return self.dtype

    @property
    def addends(self) -> int:
        """Ranks whose 16-bit results an element of the output adds up. A library may round after each addition."""
        return 1

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks that take part."""

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and the output of one rank. By default those of the tensors that the operator draws."""
        return type(self).measure(self)

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank; 0 where they say nothing, as for an exchange."""
        return 0

    @classmethod
    def varying(cls) -> dict[str, int]:
        """The sizes that a model changes from call to call, each with the largest that is allowed."""
        return {entry.name: entry.metadata["most"] for entry in fields(cls) if entry.metadata.get("varying")}

    @classmethod
    def required(cls) -> list[str]:
        """The fields that have no default."""
        return [entry.name for entry in fields(cls) if entry.default is MISSING]

    @cached_property
    def key(self) -> str:
        """Canonical name, for instance `my-operator/m=512,n=7168,dtype=bf16,world_size=4`."""
        return f"{self.op}/" + ",".join(f"{name}={value}" for name, value in self.to_dict().items() if name != "op")

    def to_dict(self) -> dict[str, Any]:
        """The problem as plain values, the operator's name first. Unnamed fields at their default are left out."""
        return {"op": self.op} | {entry.name: getattr(self, entry.name) for entry in self._named()}

    def _named(self) -> Iterable[Field[Any]]:
        for entry in fields(self):
            if "unnamed" not in entry.metadata or getattr(self, entry.name) != entry.metadata["unnamed"]:
                yield entry

    def brief(self) -> str:
        """The problem in a few words, without operator and ranks: its sizes, and fields that differ from their defaults."""
        shown = [entry for entry in self._named() if entry.default is MISSING or getattr(self, entry.name) != entry.default]
        return ", ".join(f"{entry.name} {getattr(self, entry.name)}" for entry in shown if entry.name != "world_size")

    def with_unusual(self, text: str, *names: str) -> str:
        """The text, and the fields of these names that differ from their defaults, for `brief`."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        return text + "".join(f", {name} {getattr(self, name)}" for name in names if getattr(self, name) != defaults[name])

    def __str__(self) -> str:
        return self.key


# Checks that operators share


def require_divided(problem: Any, heads: str, *, scattered: bool = False) -> None:
    """Raises UsageError unless the ranks can share out these heads, as a `scattered` output needs."""
    count, ranks = getattr(problem, heads), problem.world_size
    if count % ranks:
        subject, remedy = ("with --output head_scatter it", ", or --output replicated") if scattered else ("it", "")
        raise UsageError(
            f"{heads} is {count} on {ranks} ranks; {subject} must be a multiple of the world size: "
            f"give another {_option(heads)} or --world-size{remedy}"
        )


def require_grouped(problem: Any) -> None:
    """Raises UsageError unless each KV head serves equally many query heads."""
    if problem.q_heads % problem.kv_heads:
        raise UsageError(
            f"q_heads is {problem.q_heads} and kv_heads {problem.kv_heads}; q_heads must be a multiple of kv_heads: "
            "give another --q-heads or --kv-heads"
        )


def require_countable(problem: Any) -> None:
    """Raises UsageError if a tensor [batch, heads, head_dim] has more elements than 32 bits count."""
    if (elements := problem.batch * problem.heads * problem.head_dim) > _MAX_SIZE:
        raise UsageError(f"batch x heads x head_dim is {elements}; it must be at most {_MAX_SIZE}: give a smaller --batch")


def with_world_size(problem: P, world_size: int) -> P:
    """The same problem on another number of ranks."""
    return replace(problem, world_size=world_size)  # type: ignore[call-arg]
