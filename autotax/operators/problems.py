"""The operators of the package, in the order of listings; `autotax` exports their problem classes under these names."""

from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.all_reduce_norm import AllReduceNorm
from autotax.operators.decode_merge import DecodeMerge
from autotax.operators.flash_decode import FlashDecode
from autotax.operators.gather_attention import GatherAttention
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.head_gather import HeadGather

__all__ = ["AllGatherGemm", "AllReduceNorm", "DecodeMerge", "FlashDecode", "GatherAttention", "GemmReduceScatter", "HeadGather"]
