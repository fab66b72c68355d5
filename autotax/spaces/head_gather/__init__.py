"""Search spaces of head gather: one module per variant."""
