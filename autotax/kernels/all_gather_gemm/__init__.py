"""All-Gather + GEMM: one module a variant."""
