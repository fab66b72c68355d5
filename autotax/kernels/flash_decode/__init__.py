"""Distributed Flash Decode: one module a variant."""

from autotax.kernels.flash_decode.bsp import Bsp
from autotax.kernels.flash_decode.fused import Fused
from autotax.kernels.flash_decode.single import Single

VARIANTS = {"bsp": Bsp, "fused": Fused, "single": Single}
