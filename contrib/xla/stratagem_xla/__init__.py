"""Train on TPUs and other devices of XLA: accelerators, and strategies that compile a program for each batch."""
