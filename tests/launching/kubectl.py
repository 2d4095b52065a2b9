"""Stand-in for kubectl, with folders as clusters.

``CLUSTERS/CONTEXT/jobset`` has the label and the conditions of the only JobSet, ``…/deployment`` and other kinds the label of
an object. A subfolder named as a namespace has the objects of that namespace, and ``CLUSTERS/namespace`` the default one of all
contexts. Messages are those of kubectl 1.32.4, recorded against a server with Kubernetes' own answers.
"""

import os
from pathlib import Path

import pytest

from tests.launching.made import executable

TEXT = """#!{python} -IS
import os, pathlib, re, sys
clusters = pathlib.Path(os.environ["CLUSTERS"])
words = sys.argv[1:]
with (clusters / "calls").open("a") as out:
    out.write(" ".join(words) + "\\n")
if words[0] == "config":
    if not (clusters / "current").exists():
        sys.exit("error: current-context is not set")
    chosen = clusters / "namespace"
    if words[1] == "view":
        print(chosen.read_text() if chosen.exists() else "", end="")
    else:
        print((clusters / "current").read_text())
    sys.exit()
if (clusters / "down").exists():
    sys.exit("The connection to the server 10.0.0.2 was refused - did you specify the right host or port?")
(context,) = [word.partition("=")[2] for word in words if word.startswith("--context=")]
if not (clusters / context).exists():
    sys.exit("Error in configuration: context was not found for specified context: " + context)
given = [word.partition("=")[2] for word in words if word.startswith("--namespace=")]
given += [words[words.index("--namespace") + 1]] if "--namespace" in words else []
given += [(clusters / "namespace").read_text()] if (clusters / "namespace").exists() else []
if given and (clusters / context / given[0]).is_dir():
    context = context + "/" + given[0]
jobset = clusters / context / "jobset"
there = jobset.exists()
# The cluster has no PodMonitoring.
lacking = clusters / "lacking"
SERVED = ("configmap", "service", "deployment", "poddisruptionbudget", "podmonitoring", "horizontalpodautoscaler", "networkpolicy")
if words[0] == "apply" and "jobset.yaml" in words:
    text = pathlib.Path("jobset.yaml").read_text()
    # An unchanged object stays as it is, ended or not.
    if not there:
        jobset.write_text(re.search("systolic/launch: (.*)", text)[1].strip("'") + ",")
elif words[0] == "apply" and "serve.yaml" in words:
    text = pathlib.Path("serve.yaml").read_text()
    (clusters / context / "deployment").write_text(re.search("systolic/launch: (.*)", text)[1].strip("'"))
    if lacking.exists():
        sys.exit('error: resource mapping not found for name: "chat-v5e-8" namespace: "" from "serve.yaml": no matches for kind "PodMonitoring" in version "monitoring.googleapis.com/v1"\\nensure CRDs are installed first')
elif words[1] == "podmonitoring" and lacking.exists():
    sys.exit('error: the server doesn\\'t have a resource type "podmonitoring"')
elif words[0] == "get" and words[1] in SERVED:
    path = clusters / context / words[1]
    if not path.exists():
        sys.exit('Error from server (NotFound): %ss "%s" not found' % (words[1], words[2]))
    print(path.read_text(), end="")
elif words[:2] == ["get", "jobset"]:
    if not there:
        sys.exit('Error from server (NotFound): jobsets.jobset.x-k8s.io "%s" not found' % words[2])
    print(jobset.read_text(), end="")
elif words[0] == "delete" and "--selector" in words:
    wanted = words[words.index("--selector") + 1].rpartition("=")[2]
    serve = clusters / context / "deployment"
    if "deployment" in words[1] and serve.exists() and serve.read_text() == wanted:
        serve.unlink()
        print('deployment.apps "chat-v5e-8" deleted')
    elif "jobset" in words[1] and there and jobset.read_text().startswith(wanted + ","):
        jobset.unlink()
        print('jobset.jobset.x-k8s.io "digits-v5e-16" deleted')
    else:
        print("No resources found")
elif words[0] == "delete":
    jobset.unlink()
elif words[0] == "logs":
    print("step 10")
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *contexts: str) -> Path:
    """Puts the stand-in first on the path; returns the folder of its clusters. The first cluster is the current one."""
    clusters = folder / "clusters"
    executable(clusters / "bin" / "kubectl", TEXT)
    for context in contexts:
        (clusters / context).mkdir()
    if contexts:
        (clusters / "current").write_text(contexts[0])
    monkeypatch.setenv("CLUSTERS", str(clusters))
    monkeypatch.setenv("PATH", f"{clusters / 'bin'}:{os.environ['PATH']}")
    return clusters
