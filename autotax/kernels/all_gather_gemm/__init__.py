"""All-Gather + GEMM."""
