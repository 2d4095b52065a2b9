"""Measured profiles (XSpace), read into the same timeline that a simulation gives."""

from systolic.profile.profile import Op, Profile, open_profile, read_profile

__all__ = ["Op", "Profile", "open_profile", "read_profile"]
