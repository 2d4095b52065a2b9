"""Write access to a file: code that is loaded (a pickle) must not come from another user."""

import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0


def others_who_write(path: Path) -> str | None:
    """Other users (not root) who can change ``path``, directly or through a folder above it.

    Returns ``/a/b belongs to eve``, ``/a is writable by all (mode 777)`` or ``None``. A folder
    with the sticky bit (``/tmp``) lets others add entries but not replace this user's.
    """
    real = path.resolve()
    for place in (real, *real.parents):
        state = place.stat()
        if state.st_uid not in (os.geteuid(), ROOT):
            return f"{place} belongs to {_user(state.st_uid)}"
        mode = f"(mode {stat.S_IMODE(state.st_mode):o})"
        if stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX and place != real:
            continue
        if state.st_mode & stat.S_IWOTH:
            return f"{place} is writable by all {mode}"
        if state.st_mode & stat.S_IWGRP and not _private(state.st_gid):
            return f"{place} is writable by the group {_group(state.st_gid)} {mode}"
    return None


def _private(group: int) -> bool:
    """Whether a group is root's, or this user's own: of the same name and without other members."""
    if group == ROOT:
        return True
    try:
        known = grp.getgrgid(group)
    except KeyError:
        return False
    own = _user(os.geteuid())
    return known.gr_name == own and set(known.gr_mem) <= {own}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
