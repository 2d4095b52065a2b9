"""Pure functions of arrays: the train step, the eval step, prefill and decode, and how they are sharded.

What is forecast, what is trained and what is served come from here.
"""
