"""GEMM + Reduce-Scatter and GEMM + All-Reduce: kernels of their variants, and shared code in `product` and `reduction`."""
