"""Stand-in for gcloud, with a queued resource whose states come from a file."""

from pathlib import Path

from tests.launching.made import executable

ANSWERS = {
    "ABSENT": "NOT_FOUND: Resource 'projects/my-project/locations/us-east5-b/queuedResources/lm' was not found. This command is authenticated as me@example.com which is the active account specified by the [core/account] property\n- '@type': type.googleapis.com/google.rpc.ResourceInfo\n  resourceName: projects/my-project/locations/us-east5-b/queuedResources/lm",
    "ANYTHING": "NOT_FOUND: Requested entity was not found. This command is authenticated as me@example.com which is the active account specified by the [core/account] property.",
    "NO_PROJECT": "NOT_FOUND: Resource 'projects/my-project' was not found. This command is authenticated as me@example.com which is the active account specified by the [core/account] property",
    "EXPIRED": "There was a problem refreshing your current auth tokens: Reauthentication failed. cannot prompt during non-interactive execution.\nPlease run:\n\n  $ gcloud auth login\n\nto obtain new credentials.",
    "DENIED": "PERMISSION_DENIED: Permission 'tpu.queuedResources.get' denied on 'projects/my-project/locations/us-east5-b/queuedResources/lm'. This command is authenticated as me@example.com which is the active account specified by the [core/account] property",
}
"""Errors of ``describe`` as recorded from Google Cloud SDK 528.0.0, for answers of the service and an expired session."""

TEXT = """#!{python} -IS
import pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
if words == ["config", "get", "project"]:
    project = here / "project"
    if project.exists():
        print(project.read_text())
    else:
        print("(unset)", file=sys.stderr)
    sys.exit()
verb = words[3]
with (here / "calls").open("a") as out:
    out.write(" ".join(words[3:]) + "\\n")
path = here / "states"
states = path.read_text().split()
first, _, owner = states[0].partition(":")
if verb == "describe":
    if len(states) > 1 and first not in ("ABSENT", "FAILED", "SUSPENDED"):
        path.write_text(" ".join(states[1:]))
    if first in {answers}:
        answer = {answers}[first].replace("queuedResources/lm", "queuedResources/" + words[4])
        sys.exit("ERROR: (gcloud.compute.tpus.queued-resources.describe) " + answer)
    label, made = here / "label", here / "made"
    owner = owner or (label.read_text() if label.exists() else "0a1b2c3d")
    time = made.read_text() if made.exists() else "2026-01-01T00:00:00Z"
    print(first, "" if owner == "None" else owner, time, sep=",")
elif verb == "create":
    if first != "ABSENT":
        sys.exit("ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: Resource already exists")
    path.write_text(" ".join(states[1:]))
    (label,) = [word.rpartition("=")[2] for word in words if word.startswith("--labels=")]
    (here / "label").write_text("None" if (here / "unlabelled").exists() else label)
    (here / "made").write_text("2026-11-23T10:00:00.123456Z")
elif verb == "delete":
    if first in ("EXPIRED", "DENIED"):
        path.write_text(" ".join(states[1:]))
        sys.exit("ERROR: (gcloud.compute.tpus.queued-resources.delete) " + {answers}[first])
    path.write_text(" ".join(["ABSENT", *states[first in ("FAILED", "SUSPENDED") :]]))
elif verb == "scp":
    sys.exit((here / "scp").exists())
elif verb == "ssh":
    (command,) = [word for word in words if word.startswith("--command=")]
    name = "codes" if command.endswith("host.sh wait") else "connections" if "mkdir" in command else ""
    codes = (here / name).read_text().split() if name and (here / name).exists() else []
    if name and codes:
        (here / name).write_text(" ".join(codes[1:]) or codes[0])
        (here / "last").write_text(codes[0])
        if codes[0] == "nobody":
            # As gcloud does if a node is gone.
            print("WARNING: Could not prepare all 1 nodes, attempting to ssh into the rest.", file=sys.stderr)
            sys.exit()
        if codes[0] != "0":
            sys.exit(int(codes[0]))
    gone = "code_of_exit" in command and (here / "last").read_text() == "nobody"
    if command.endswith("&& echo here") and not gone:
        print("here")
"""
"""Client that records its calls; states of the TPUs (with the owner, if it is another) and exit codes of the training
come from files."""


def gcloud(folder: Path, states: str, codes: str) -> Path:
    """Writes the stand-in into a folder.

    Args:
        folder: Its own, with the files that it reads.
        states: Of the queued resource, one after another; the last one stays.
        codes: Exit codes of the training, or of the connection to it, one after another; the last one stays. Those of the
            first connection are in ``connections``, where ``nobody`` finds no machine.
    """
    (folder / "states").write_text(states)
    (folder / "codes").write_text(codes)
    return executable(folder / "gcloud", TEXT.replace("{answers}", repr(ANSWERS)))
