"""Callbacks for common needs. Each is in its own module, which is imported when the callback is chosen."""

__version__ = "0.1.0"
