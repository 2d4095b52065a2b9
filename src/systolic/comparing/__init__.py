"""Comparison of two models: size, quality, answers to the same inputs, latency here and forecasts."""
