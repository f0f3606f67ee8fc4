"""The bytes of a checkpoint."""
