"""Hypothesis profiles, and the few fixtures that every test may use."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__: list[str] = []

# No deadline anywhere: a test never depends on how busy the machine is.
settings.register_profile("default", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
# The same examples on every run, and a blob that replays a failure.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
# New examples every night, and many of them.
settings.register_profile("nightly", parent=settings.get_profile("default"), max_examples=1000, print_blob=True)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
