"""The ranks of processes that a cluster's scheduler or MPI started."""
