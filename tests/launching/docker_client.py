"""Stand-in for Docker's client, with the containers of an engine in a file."""

import json
from pathlib import Path
from typing import Any

from tests.launching.made import executable

TEXT = """#!{python} -IS
import json, pathlib, re, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
if (here / "down").exists():
    sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
path = here / "containers"
there = json.loads(path.read_text()) if path.exists() else []
fails = (here / "fails").read_text().strip() if (here / "fails").exists() else ""
statuses = {"created": "Created", "running": "Up 2 minutes", "exited": "Exited (%s) 2 minutes ago"}

def keep():
    path.write_text(json.dumps(there))

def find(name):
    for one in there:
        if name in (one["id"], one["name"]):
            return one
    sys.exit("Error response from daemon: No such container: " + name)

if words[0] == "ps":
    wanted = dict(word.split("=", 1) for word in words if re.match("(name|label)=", word))
    found = [one for one in there if re.search(wanted.get("name", ""), "/" + one["name"])]
    found = [one for one in found if wanted.get("label", "=" + one["label"]).split("=")[1] == one["label"]]
    form = words[words.index("--format") + 1] if "--format" in words else "{{.ID}}"
    for one in found:
        status = statuses[one["state"]].replace("%s", str(one["code"]))
        text = form.replace("{{.Status}}", status).replace("{{.State}}", one["state"])
        print(text.replace('{{.Label "systolic.launch"}}', one["label"]).replace("{{.ID}}", one["id"]))
elif words[:2] == ["container", "inspect"]:
    one = find(words[-1])
    print(words[3].replace("{{.State.Status}}", one["state"]).replace("{{.State.ExitCode}}", str(one["code"])))
elif words[0] == "build":
    if fails == "build":
        sys.exit('ERROR: failed to solve: process "/bin/sh -c pip install" did not complete successfully: exit code: 1')
elif words[0] == "run":
    name = words[words.index("--name") + 1]
    if any(one["name"] == name for one in there):
        print('docker: Error response from daemon: Conflict. The container name "/%s" is already in use by container "f00".' % name, file=sys.stderr)
        sys.exit(125)
    label = words[words.index("--label") + 1].removeprefix("systolic.launch=")
    state = "created" if fails == "run" else "running"
    there.append({"id": "c%d" % len(there), "name": name, "label": label, "state": state, "code": 0})
    keep()
    if fails == "run":
        print('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].', file=sys.stderr)
        sys.exit(125)
elif words[0] == "stop":
    find(words[1]).update(state="exited", code=137 if fails == "save" else 143)
    keep()
    print(words[1])
elif words[0] == "rm":
    one = find(words[1])
    if one["state"] == "running":
        sys.exit('Error response from daemon: cannot remove container "/%s": container is running: stop the container before removing or force remove' % one["name"])
    there.remove(one)
    keep()
    print(words[1])
elif words[0] == "logs":
    print("step 10 of", find(words[-1])["name"])
"""
"""Messages are those of Docker Engine 28."""


def docker(folder: Path) -> Path:
    """Writes the stand-in into ``folder/docker``; returns that folder.

    There, ``down`` stops the engine, and ``fails`` names the command that fails: build, run, or save for a training
    that has not saved when it is killed.
    """
    return executable(folder / "docker" / "docker", TEXT).parent


def containers(engine: Path) -> list[dict[str, Any]]:
    """Containers of the engine."""
    path = engine / "containers"
    return json.loads(path.read_text()) if path.exists() else []
