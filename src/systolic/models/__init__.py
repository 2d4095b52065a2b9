"""Model families as Flax NNX modules, one folder each.

``config.py`` of a family is a frozen value that imports without jax; ``module.py`` is the network.
Modules compute in the dtype of the parameters they are given; norms and softmax run in float32.
"""
