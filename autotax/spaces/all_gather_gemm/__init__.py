"""Search spaces of All-Gather + GEMM: one module per variant; `tiles` holds their shared parts."""
