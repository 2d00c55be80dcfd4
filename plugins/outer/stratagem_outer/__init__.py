"""Strategies whose replicas diverge between syncs: start reading in `stratagem_outer.diverging_replicas`."""
