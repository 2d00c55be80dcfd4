"""Strategies whose processes train models of their own for a while: start reading in `stratagem_outer.diverging_replicas`."""
