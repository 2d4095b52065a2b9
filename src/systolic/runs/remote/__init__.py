"""Runs, Bundles and data in buckets (``s3://``, ``gs://``): local copies, uploads, checkpoints of several hosts."""
