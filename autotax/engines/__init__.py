"""Plugins for inference servers and training frameworks.

Each module belongs to one framework. It imports the framework when it is called, never before.
"""
