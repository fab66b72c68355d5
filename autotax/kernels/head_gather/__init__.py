"""Head gather: one module per variant."""
