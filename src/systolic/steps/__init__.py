"""Pure functions of arrays: the train step, the eval step, prefill and decode, and how they are sharded.

Forecasts, training and generation use the same functions.
"""
