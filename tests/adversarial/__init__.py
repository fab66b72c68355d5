"""Generators of hostile input: command lines, environments, files and kills that no sane user would produce. See
docs/reliability.md.
"""
