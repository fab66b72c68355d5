"""All-Gather + GEMM: one module per variant."""
