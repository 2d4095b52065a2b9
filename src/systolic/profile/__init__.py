"""Measured profiles (XSpace), read into the same timeline that a simulation gives."""

from systolic.profile.profile import Profile, ProfiledOp, open_profile

__all__ = ["Profile", "ProfiledOp", "open_profile"]
