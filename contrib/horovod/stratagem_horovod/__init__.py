"""Train with Horovod: a strategy, the environment of horovodrun, and a launcher that runs horovodrun.

The plugins are in modules of their own, so that listing environments does not import torch.
"""
