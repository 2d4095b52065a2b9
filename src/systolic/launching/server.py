"""Makes a launch of a model server: description and hourly price."""

from collections.abc import Sequence
from pathlib import Path

from systolic.artifact.bundle import MANIFEST
from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.launching import Launch, LaunchBill, Purchase, Site
from systolic.launching.gke_serve import GkeServer
from systolic.launching.names import is_bucket, refuse_secrets
from systolic.launching.request import default_name
from systolic.serving.docker.folder import name_of


def describe(
    bundle: str,
    *,
    on: Slice,
    words: Sequence[str],
    made_by: Sequence[str],
    names: tuple[str, str],
    image: str,
    purchase: Purchase,
    site: Site,
) -> Launch:
    """Describes the launch of a server.

    Args:
        bundle: Local folder whose content is in the image, or a folder in a bucket.
        on: Slice of each pod.
        words: More arguments of ``systolic serve``.
        made_by: Command line, for the file's header.
        names: Names of the model and of the launch; empty ones are derived from the Bundle's.
        image: Container image.
        purchase: How the chips are paid for.
        site: Namespace and service account.

    Raises:
        OptionError: the Bundle does not exist, or an argument looks like a secret.
    """
    from systolic import __version__

    refuse_secrets((*words, *made_by))
    if not is_bucket(bundle) and not (Path(bundle) / MANIFEST).is_file():
        raise OptionError(
            f"{bundle} is not a Bundle; make one with systolic import or export, or give gs://BUCKET/FOLDER"
        )
    model = names[0] or name_of(Path(bundle.rstrip("/").rpartition("/")[2] or bundle))
    return Launch(
        name=names[1] or default_name(model, on),
        on=on,
        target=model,
        options=tuple(words),
        made_by=tuple(made_by),
        run=bundle if is_bucket(bundle) else "",
        purchase=purchase,
        image=image,
        site=site,
        version=__version__,
    )


def bill(launch: Launch, server: GkeServer) -> LaunchBill:
    """Hourly price, for the minimum and the maximum number of pods."""
    spot = launch.purchase is Purchase.spot
    price, region, _ = launch.on.rate("spot" if spot else "on_demand")
    if price is None:
        text = f"no {launch.purchase.value} price in the catalogue"
    else:
        least, most = f"${price * server.replicas:,.2f}", f"${price * server.most:,.2f}"
        text = f"{least} an hour {launch.purchase.value} for {server.replicas} pod{'s' if server.replicas > 1 else ''}"
        if server.most > server.replicas:
            text += f" (minimum) to {most} for {server.most} (maximum)"
        text += f" (prices of {region})"
    return LaunchBill(
        purchase=launch.purchase,
        usd_per_hour=None if price is None else price * server.replicas,
        region=region,
        usd_per_hour_most=None if price is None else price * server.most,
        instead=text,
    )
