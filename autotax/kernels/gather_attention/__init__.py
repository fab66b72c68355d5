"""Gather + attention."""
