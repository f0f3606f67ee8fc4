"""Checkpoints that others wrote, read through the same call: Orbax, zarr, safetensors, torch.save.

They carry no checksums that we could verify beyond their own: what TensorStore or the file's codec detects is an
error, what they do not detect we cannot know.
"""
