"""The second level: what lets the code of a model stay as it was written for one process.

The first level arranges processes on a mesh, and runs models that are written for it: torch's styles, shards, stages.
It loads this one through `on_demand` alone, when a run needs it.
"""
