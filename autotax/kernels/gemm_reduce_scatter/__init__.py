"""GEMM + Reduce-Scatter and GEMM + All-Reduce: one module a variant, and what they share in `product` and `reduction`."""
