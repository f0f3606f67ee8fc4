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

# Eight CPU devices for the tests of shardings. Set here, because whichever test imports jax first fixes their number.
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
