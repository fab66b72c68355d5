"""What may vary in head gather: one module a variant."""
