"""``systolic launch serve BUNDLE --via gke``: serves a model on a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from systolic.cli.launch import finish, folder_of, output, without_steps, words
from systolic.cli.parse import asks_help, parse
from systolic.cli.target import first
from systolic.core.arguments import Required
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.report.output import print_json

TAKEN = ("--host", "--port", "--keys", "--new-key", "--grace-seconds", "--log", "--json")
"""Options of ``systolic serve`` that the launch sets."""


@dataclass(frozen=True, kw_only=True)
class LaunchServeOptions:
    """Writes the objects that serve a Bundle on Google Kubernetes Engine, and shows the price per hour; --show prints them, --submit applies them.

    A pod is a server on one TPU machine. The number of pods follows the load, up to --max-replicas. systolic status, logs and stop
    take the launch's name.

    Args:
        bundle: Bundle that the image contains, or gs://BUCKET/FOLDER, which the pods mount.
        via: Platform: gke.
        on: Slice of each pod, with one host: v5e-1, v5e-8, v6e-8 or v5p-8.
        submit: Run kubectl now; otherwise the file is only written.
        show: Print the file.
        image: Container image, for example one built with systolic export BUNDLE --to docker --for tpu.
        variant: deployment, or kserve for a KServe InferenceService.
        model: Name of the model for clients; by default the Bundle's folder.
        name: Name of the launch; by default the model and the slice.
        out: Folder for the file; by default launches/NAME.
        replicas: Minimum number of pods.
        max_replicas: Maximum number of pods.
        metric: Gauge of the server that the autoscaler follows; those with num_ are for language models.
        target: Target of the gauge per pod.
        grace_seconds: Time for requests in flight when a pod is terminated.
        keys_secret: Kubernetes Secret with keys.txt, the file of API keys' hashes.
        serve: More options for systolic serve, as one argument: --serve="--context 8192 --rows 32".
        spot: Use spot chips, which are cheaper and can be preempted at any time.
        namespace: Kubernetes namespace.
        service_account: Service account of the pods.
        json: Print one JSON object.
    """

    bundle: Annotated[str, tyro.conf.Positional]
    via: Annotated[Literal["gke"], Required("a platform; add --via gke")]
    on: str = "v5e-8"
    submit: bool = False
    show: bool = False
    image: str = ""
    variant: str = "deployment"
    model: str = ""
    name: str = ""
    out: Path | None = None
    replicas: Annotated[int, COUNT] = 1
    max_replicas: Annotated[int, COUNT] = 4
    metric: str = "http_requests_in_flight"
    target: Annotated[int, COUNT] = 32
    grace_seconds: Annotated[int, NOT_NEGATIVE] = 45
    keys_secret: str = ""
    serve: str = ""
    spot: bool = False
    namespace: str = ""
    service_account: str = ""
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not asks_help(args):
        first(args, "launch serve", "a Bundle, or gs://BUCKET/FOLDER")
    options = parse(LaunchServeOptions, args, "systolic launch serve")
    from systolic.chips import slice
    from systolic.launching import Purchase, Site
    from systolic.launching.gke_serve import GkeServer, command, prepare
    from systolic.session import launched, launching_server

    server = GkeServer(
        variant=options.variant,
        grace_seconds=options.grace_seconds,
        replicas=options.replicas,
        most=options.max_replicas,
        metric=options.metric,
        target=options.target,
        keys_secret=options.keys_secret,
    )
    made = launching_server.describe(
        options.bundle,
        on=slice(options.on),
        words=served_words(options.serve),
        made_by=("systolic", "launch", "serve", *without_steps(args)),
        names=(options.model, options.name),
        image=options.image,
        purchase=Purchase.spot if options.spot else Purchase.on_demand,
        site=Site(namespace=options.namespace, service_account=options.service_account),
    )
    made = launched.as_before(made, folder_of(made, options.out))
    prepared = prepare(made, server)
    record, shown = finish(
        made,
        prepared,
        launching_server.bill(made, server),
        via=options.via,
        out=options.out,
        command=command(made, server),
        submit=options.submit,
        output=output(show=options.show, json=options.json),
    )
    if options.json:
        print_json(shown)
    else:
        from systolic.cli.launch import following

        print("\n".join(following(record, ["serve", *args])))
    return 0


def served_words(text: str) -> list[str]:
    """Options for ``systolic serve``, checked as that verb checks them.

    Raises:
        OptionError: an option is unknown, out of range, or set by the launch.
    """
    from systolic.cli.main import VERBS

    found = words("serve", text)
    for word in found:
        if word.partition("=")[0] in TAKEN:
            raise OptionError(
                f"--serve has {word}, which the launch sets; leave it out, or give --grace-seconds or --keys-secret to launch serve"
            )
    if models := parse(VERBS["serve"].forms[0].options.read, found, "systolic serve").models:
        raise OptionError(
            f"--serve has {models[0]!r}, which is not an option; the model is the Bundle"
        )
    return found
