"""Processes: how they are started, how they find each other, what they send, and what one says when another is gone."""
