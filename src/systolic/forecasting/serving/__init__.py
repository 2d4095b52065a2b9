"""Forecast of a server: its steps on a slice, the load that they carry, and the replicas that take a demand."""
