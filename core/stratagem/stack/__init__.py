"""The registry of installed plugins, the resolver that chooses those of a run, and descriptions of them."""
