"""Train on TPUs, and on other devices of XLA: accelerators `tpu` and `xla`, strategies that build a graph for each batch."""
