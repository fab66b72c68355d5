"""Search spaces of decode merge: one module per variant."""
