"""MobileNetV2 (Sandler et al. 2018): inverted residuals with linear bottlenecks."""
