"""The commands after their options are read: what is asked for, the ranks, one module for each thing done with them."""
