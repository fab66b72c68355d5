"""Head gather: one module a variant."""
