"""The command line: one module a verb, each a typed function whose signature is its options."""
