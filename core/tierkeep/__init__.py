"""tierkeep: saves and restores the training state of JAX and PyTorch models from one core."""

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
