"""Arguments of the warp-specialized kernels for a tile: TMA descriptors of its blocks, and its sides as constants."""

from __future__ import annotations

import functools
from typing import TypeVar

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, parts_of, sides, x_is_a_block_of_b

T = TypeVar("T")

GLUON_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
MOST_PARTS = 3


class Views:
    """TMA boxes of a tile: of a block of A, of the parts of a block of B, and of the parts of C [shards, rows,
    columns]. See `tiling.sides`.
    """

    def __init__(self, config: Config, dtype: str) -> None:
        self.dtype = dtype
        x_is_b = x_is_a_block_of_b(config["block_m"], config["block_n"])
        x, y = sides(config["block_m"], config["block_n"])
        parts = parts_of(y)
        box_x, boxes_y = [GROUP_ROWS, BLOCK_K], [[part, BLOCK_K] for part in parts]
        self.box_a, self.boxes_b = (boxes_y[0], [box_x]) if x_is_b else (box_x, boxes_y)
        self.boxes_out = [[1, part, GROUP_ROWS] if x_is_b else [1, GROUP_ROWS, part] for part in parts]
        self.groups = x // GROUP_ROWS
        self.constants = {
            "X_IS_B": x_is_b,
            "GROUPS": self.groups,
            **{f"Y{number}": part for number, part in enumerate(padded(parts, MOST_PARTS, 0), 1)},
            "STAGES": config["num_stages"],
            "num_warps": 4,
        }

    def of(self, matrix: Tensor, box: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.dtype))

    def of_a(self, a: Tensor) -> TensorDescriptor:
        return self.of(a, self.box_a)

    def of_b(self, b: Tensor) -> list[TensorDescriptor | None]:
        return padded([self.of(b, box) for box in self.boxes_b], MOST_PARTS, None)

    def of_out(self, out: Tensor) -> list[TensorDescriptor | None]:
        return padded([self.of(out, box) for box in self.boxes_out], MOST_PARTS, None)


@functools.cache
def layout_of(block: tuple[int, ...], dtype: str) -> gl.NVMMASharedLayout:
    """The layout of a block in shared memory. Cached, because each eager call needs several layouts."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])


def padded(items: list[T], length: int, missing: T) -> list[T]:
    """Pads `items` to the number of the kernel's arguments: a launch takes no descriptors in a tuple."""
    return items + [missing] * (length - len(items))
