"""What lets the code of a model stay as it was written for one process, under the strategy `parallel`.

The strategy arranges processes on a mesh, and runs models that are written for it: torch's styles, shards, stages. It
loads this package through `on_demand` alone, when a run needs it.
"""
