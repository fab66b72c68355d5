"""Models of the kernels in plain arithmetic. Property tests enumerate them over whole spaces of configs."""
