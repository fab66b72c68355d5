"""The problems of the operators of the package, which `autotax` offers by these names."""

from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.decode_merge import DecodeMerge
from autotax.operators.flash_decode import FlashDecode
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.head_gather import HeadGather

__all__ = ["AllGatherGemm", "DecodeMerge", "FlashDecode", "GemmReduceScatter", "HeadGather"]
