"""GEMM + Reduce-Scatter and GEMM + All-Reduce: one module per variant, and shared code in `product` and `reduction`."""
