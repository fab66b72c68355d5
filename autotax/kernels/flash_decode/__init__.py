"""Distributed Flash Decode: one module a variant, in the order of the ladder from bulk-synchronous to a single kernel."""

from autotax.kernels.flash_decode.bsp import Bsp
from autotax.kernels.flash_decode.compact import Compact
from autotax.kernels.flash_decode.fine_grained import FineGrained
from autotax.kernels.flash_decode.fused import Fused
from autotax.kernels.flash_decode.gather import Gather
from autotax.kernels.flash_decode.resident import Resident
from autotax.kernels.flash_decode.single import Single

VARIANTS = {
    "bsp": Bsp,
    "gather": Gather,
    "fine_grained": FineGrained,
    "fused": Fused,
    "single": Single,
    "resident": Resident,
    "compact": Compact,
}
