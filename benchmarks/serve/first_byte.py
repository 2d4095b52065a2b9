"""Milliseconds from a token's making to the first byte of its stream in the client's hands, on loopback.

    python benchmarks/serve/first_byte.py [--streams 200]

The server is the real one in a thread; its engine makes tokens by echo and notes when, so that no model's time is in
it. The client is httpx in the same process: its own reading is in the figure.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.serving.http.running import echo_model, running

ASKED = {"model": "echo", "prompt": "hello", "max_tokens": 3, "stream": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    options = parser.parse_args()
    model, late = echo_model(), []
    with running([model]) as server, server.client() as http:
        for _ in range(options.streams):
            with http.stream("POST", "/v1/completions", json=ASKED) as answer:
                next(answer.iter_raw())
                late.append(1e3 * (time.monotonic() - model.engine.everything[-1].made[0]))
    late.sort()
    shares = {"least": 0.0, "median": 0.5, "p90": 0.9}
    print({name: round(late[int(share * len(late))], 2) for name, share in shares.items()})


if __name__ == "__main__":
    main()
