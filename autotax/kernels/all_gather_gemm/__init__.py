"""All-Gather + GEMM: one module a variant."""

from autotax.kernels.all_gather_gemm.bsp import Bsp
from autotax.kernels.all_gather_gemm.copy_engine import CopyEngine
from autotax.kernels.all_gather_gemm.decomposed import Decomposed
from autotax.kernels.all_gather_gemm.peers import Product, TorchFused
from autotax.kernels.all_gather_gemm.pull import Pull
from autotax.kernels.all_gather_gemm.push import Push
from autotax.kernels.all_gather_gemm.push_specialized import PushSpecialized
from autotax.kernels.all_gather_gemm.push_two_kernel import PushTwoKernel
from autotax.kernels.all_gather_gemm.push_words import PushWords
from autotax.kernels.all_gather_gemm.staged_pull import StagedPull

VARIANTS = {
    "bsp": Bsp,
    "decomposed": Decomposed,
    "copy_engine": CopyEngine,
    "pull": Pull,
    "push": Push,
    "staged_pull": StagedPull,
    "push_two_kernel": PushTwoKernel,
    "push_specialized": PushSpecialized,
    "push_words": PushWords,
    # Not in the search space: for comparison only.
    "torch": TorchFused,
    "product": Product,
}
