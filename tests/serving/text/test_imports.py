"""What serves a model needs nothing that forecasts it."""

import subprocess
import sys

CODE = """
import sys
import systolic.serving.http.process, systolic.serving.text.opening, systolic.serving.text.replicas
print([name for name in sys.modules if name.startswith("systolic.forecasting")])
"""


def test_an_engine_and_its_server_import_no_forecasts() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
