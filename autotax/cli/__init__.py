"""The command line: options, the ranks, and one module for each group of commands."""
