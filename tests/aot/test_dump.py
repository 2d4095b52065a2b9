"""What a child does once the compiler has written its schedule."""

import subprocess
import sys

PROGRAM = """
import os, sys, threading
from systolic.aot.dump import LEAST_PRIORITY, step_back
ended, begun = threading.Event(), threading.Event()
tasks = []
def behind():
    tasks.append(threading.get_native_id())
    begun.set()
    ended.wait()
threading.Thread(target=behind).start()
begun.wait()
mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
step_back()
assert os.getpriority(os.PRIO_PROCESS, tasks[0]) == LEAST_PRIORITY
assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
ended.set()
"""


def test_the_compile_behind_a_schedule_leaves_the_processor_to_its_reader() -> None:
    if not sys.platform.startswith("linux"):
        return
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
