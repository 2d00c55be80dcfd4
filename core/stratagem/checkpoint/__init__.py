"""Atomic checkpoint files, background saves, and checks of the state in a checkpoint."""
