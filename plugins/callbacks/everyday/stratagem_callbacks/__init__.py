"""Callbacks for every day. Each lives in a module of its own, imported when it is chosen."""

__version__ = "0.1.0"
