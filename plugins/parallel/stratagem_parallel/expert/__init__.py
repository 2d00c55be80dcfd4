"""Expert parallelism: each rank holds some of the experts of every layer."""
