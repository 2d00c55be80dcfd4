"""Which plugins a run consists of: the registry of installed ones, the resolver that chooses, and descriptions."""
