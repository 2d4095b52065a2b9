"""Models on their way out: inference as pure functions with named inputs and outputs, and formats that hold them."""
