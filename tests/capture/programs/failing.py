"""Fails before its step has repeated."""

import jax

print(len(jax.devices()), jax.default_backend())
raise KeyError("no such data set")
