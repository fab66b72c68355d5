"""Search spaces of GEMM + Reduce-Scatter: one module per variant; `tiles` holds their shared parts."""
