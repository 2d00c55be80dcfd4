"""Checkpoint formats: one engine, and layouts that describe the files."""
