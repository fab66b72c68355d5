"""What may vary in All-Gather + GEMM: one module a variant, and what they share in `tiles`."""
