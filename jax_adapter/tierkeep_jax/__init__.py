"""tierkeep for JAX: saves and restores any pytree, under any sharding, onto any other."""

from .checkpointer import Checkpointer, load, save, verify

__all__ = ["Checkpointer", "load", "save", "verify"]
