"""Expert parallelism: each rank holds some of the experts of every layer."""

from stratagem_parallel.expert.axis import ExpertAxis

__all__ = ["ExpertAxis"]
