"""Changes of a torch module: recomputed activations, synchronized batch normalization, which modules to wrap."""
