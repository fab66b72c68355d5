"""Search spaces of gather + attention, one function per variant."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gather_attention import GatherAttention

LIBRARIES: dict[str, tuple[Value, ...]] = {"cuda": ("cudnn", "flash"), "rocm": ("flash",), "cpu": ("cpu",)}
"""The attention of torch: cuDNN's, the flash attention that torch brings along, and that for CPUs."""


def _by_library(variant: str, hardware: Hardware) -> VariantSpace:
    """The one parameter of variants with the vendor's attention is the library."""
    libraries = LIBRARIES[hardware.backend]
    return VariantSpace(variant, {"library": libraries}, (), tuple(Config.of(variant, library=library) for library in libraries))


def bsp(problem: GatherAttention, hardware: Hardware) -> VariantSpace:  # noqa: ARG001
    """See `_by_library`."""
    return _by_library("bsp", hardware)


def decomposed(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """None for one rank, which has all keys."""
    return _by_library("decomposed", hardware) if problem.world_size > 1 else None


def heads(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """None where the ranks do not divide the heads."""
    divided = problem.kv_heads % problem.world_size == 0
    return _by_library("heads", hardware) if divided and problem.world_size > 1 else None
