"""A 10M-parameter language model in the shape of GPT-2, side by side: see README.md."""

import harness

if __name__ == "__main__":
    harness.main("language", "tokens")
