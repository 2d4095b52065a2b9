"""Rematerialisation: which activations of a layer are saved for the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name as name

from systolic.job import Layout, Remat

__all__ = ["name", "rematerialise"]


def rematerialise(
    layer: Callable[..., Any], layout: Layout, *, scanned: bool = True
) -> Callable[..., Any]:
    """``layer`` under the layout's policy; activations are named with :func:`name` inside it.

    Offload keeps the named activations in the host's pinned memory (platforms that have it). Outside of a scan
    the compiler would find what is computed again to be what it has already, and keep that.
    """
    policies = jax.checkpoint_policies
    match layout.remat:
        case Remat.none:
            return layer
        case Remat.full:
            policy = policies.nothing_saveable
        case Remat.minimal:
            policy = policies.dots_with_no_batch_dims_saveable
        case Remat.save_names:
            policy = policies.save_only_these_names(*layout.remat_names)
        case Remat.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(layout.saved_names),
                names_which_can_be_offloaded=list(layout.remat_names),
                offload_src="device",
                offload_dst="pinned_host",
            )
    return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)
