"""What every layer stands on: errors, units, origins, digests and files that are never half written."""
