"""What the kernels of a config do, as plain arithmetic: models that property tests enumerate over whole spaces."""
