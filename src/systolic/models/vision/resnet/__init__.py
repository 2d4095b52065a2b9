"""Residual convolutional networks (He et al. 2016), with the stride of a bottleneck on its 3x3."""
