"""Measurements of tierkeep against the raw disk and against other checkpointers: `python -m bench --help`."""

__all__: list[str] = []
