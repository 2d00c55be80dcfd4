"""Changes of a torch module: values for one built without, recomputed activations, synchronized batch normalization."""
