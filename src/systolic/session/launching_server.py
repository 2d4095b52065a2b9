"""From a Bundle to the description of its server on a cluster, and what an hour of it costs."""

from collections.abc import Sequence
from pathlib import Path

from systolic.artifact.bundle import MANIFEST
from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.launching import Launch, LaunchBill, Purchase, Site
from systolic.launching.gke_serve import GkeServer
from systolic.launching.names import fitting, is_bucket, refuse_secrets
from systolic.session.docker.folder import name_of


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
    """The launch of a server.

    Args:
        bundle: A folder here, whose content is in the image, or one in a bucket.
        on: What each pod has.
        words: More options of ``systolic serve``.
        made_by: The command line, for the file's header.
        names: Of the model and of the launch; empty ones are made of the Bundle's.
        image: The container image.
        purchase: How the chips are paid for.
        site: Namespace and service account.

    Raises:
        OptionError: there is no such Bundle, or a word looks like a secret.
    """
    from systolic import __version__

    refuse_secrets((*words, *made_by))
    if not is_bucket(bundle) and not (Path(bundle) / MANIFEST).is_file():
        raise OptionError(
            f"{bundle} is no Bundle, which the image of a server holds; make one with systolic import or export, or give gs://BUCKET/FOLDER"
        )
    model = names[0] or name_of(Path(bundle.rstrip("/").rpartition("/")[2] or bundle))
    return Launch(
        name=names[1] or fitting(f"{model}-{on.name}"),
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
    """The price of an hour, for the fewest pods and the most."""
    spot = launch.purchase is Purchase.spot
    price, region, _ = launch.on.rate("spot" if spot else "on_demand")
    if price is None:
        text = f"no {launch.purchase.value} price in the catalogue"
    else:
        least, most = f"${price * server.replicas:,.2f}", f"${price * server.most:,.2f}"
        text = f"{least} an hour {launch.purchase.value} for {server.replicas} pod{'s' if server.replicas > 1 else ''}"
        if server.most > server.replicas:
            text += f", the fewest, to {most} for {server.most}, the most"
        text += f" (prices of {region})"
    return LaunchBill(
        purchase=launch.purchase,
        usd_per_hour=None if price is None else price * server.replicas,
        region=region,
        usd_per_hour_most=None if price is None else price * server.most,
        instead=text,
    )
