"""tierkeep for PyTorch: saves and restores nests of tensors, modules, optimizers and plain values."""

from .checkpointer import Checkpointer, load, save, verify

__all__ = ["Checkpointer", "load", "save", "verify"]
