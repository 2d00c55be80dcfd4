"""Context parallelism: each rank computes a part of every sequence."""
