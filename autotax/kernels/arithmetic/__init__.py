"""Integer arithmetic that kernels compile and Python runs: orders of work, pieces, shares, sides of tiles."""
