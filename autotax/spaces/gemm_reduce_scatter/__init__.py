"""What may vary in GEMM + Reduce-Scatter: one module a variant, and what they share in `tiles`."""
