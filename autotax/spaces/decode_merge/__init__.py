"""What may vary in decode merge: one module a variant."""
