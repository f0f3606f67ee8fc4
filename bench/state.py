"""The training states that are saved: random values, made cheaply, the same on every run.

`decoder` is a 12-layer decoder with AdamW's moments and the small things around them (step counters, a random
generator's state, `param_groups`), sized to a wanted total. `tiny` is 10,000 leaves of 256 bytes, where what counts is
the cost of a leaf.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FRAMEWORKS", "STATES", "State", "Tree", "flatten", "make_state"]

STATES = ("decoder", "tiny")
FRAMEWORKS = ("torch", "jax")

N_LAYERS = 12
BYTES_PER_PARAMETER = 12
"""A parameter and its two moments, all float32."""
VOCABULARY_PER_WIDTH = 32
TINY_LEAVES = 10_000
TINY_LEAF_NBYTES = 256
NOISE_NBYTES = 64 << 20
"""Leaves are cut from one block of noise of this size: far longer than a compressor's window."""

Tree = dict[str, Any]
Floats = npt.NDArray[np.float32]
Make = Callable[[Floats], Any]


@dataclass(frozen=True, slots=True)
class State:
    """A state to save, and what a report says of it."""

    label: str
    tree: Tree
    framework: str
    nbytes: int
    """Bytes of all arrays; the few plain numbers are not counted."""

    def arrays(self) -> dict[str, Any]:
        """The arrays alone under flat names, for formats that hold nothing else."""
        return {name: leaf for name, leaf in flatten(self.tree) if hasattr(leaf, "dtype")}

    def numpy_tree(self) -> Tree:
        """The same tree with each torch tensor as a NumPy view of its memory."""
        tree: Tree = _map(self.tree, lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf)
        return tree

    def empty_copy(self) -> Tree:
        """A tree like this one with its own memory, already touched and full of zeros: a place to restore into."""
        tree: Tree = _map(self.tree, lambda leaf: leaf.new_zeros(leaf.shape) if hasattr(leaf, "new_zeros") else leaf)
        # `new_zeros` hands out pages that the kernel fills at the first touch: touch them here, outside every clock.
        for _, leaf in flatten(tree):
            if hasattr(leaf, "zero_"):
                leaf.zero_()
        return tree


def make_state(kind: str, gb: float, framework: str) -> State:
    """Build the state `kind` (one of `STATES`) of about `gb` GB (ignored by `tiny`) with `framework`'s arrays."""
    make = _maker(framework)
    if kind == "tiny":
        label = f"{TINY_LEAVES} leaves of {TINY_LEAF_NBYTES} B"
        tree = _tiny(make)
    else:
        label, tree = _decoder(gb, make)
    nbytes = sum(leaf.nbytes for _, leaf in flatten(tree) if hasattr(leaf, "dtype"))
    return State(label=label, tree=tree, framework=framework, nbytes=nbytes)


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its dotted name."""
    if isinstance(tree, dict):
        pairs = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        pairs = [(str(index), value) for index, value in enumerate(tree)]
    else:
        yield prefix, tree
        return
    for name, value in pairs:
        yield from flatten(value, f"{prefix}.{name}" if prefix else name)


def _map(tree: object, function: Callable[[Any], object]) -> Any:
    if isinstance(tree, dict):
        return {key: _map(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(value, function) for value in tree)
    return function(tree)


def _maker(framework: str) -> Make:
    if framework == "jax":
        jnp = importlib.import_module("jax.numpy")
        return lambda values: jnp.array(values)
    torch = importlib.import_module("torch")
    return lambda values: torch.from_numpy(values).clone()


def _tiny(make: Make) -> Tree:
    noise = _noise(TINY_LEAVES * TINY_LEAF_NBYTES)
    rows = noise.reshape(TINY_LEAVES, -1)
    return {"leaves": {f"leaf_{index:05d}": make(row) for index, row in enumerate(rows)}}


def _decoder(gb: float, make: Make) -> tuple[str, Tree]:
    n_parameters = round(gb * 1e9 / BYTES_PER_PARAMETER)
    width = math.isqrt(n_parameters // (12 * N_LAYERS + VOCABULARY_PER_WIDTH))
    step = 64 if width >= 256 else 2
    width = max(2, width // step * step)
    in_layers = N_LAYERS * (12 * width * width + 2 * width) + width
    vocabulary = max(1, (n_parameters - in_layers) // width)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, width)}
    for layer in range(N_LAYERS):
        name = f"layers.{layer}"
        shapes[f"{name}.norm1.weight"] = (width,)
        shapes[f"{name}.attention.qkv.weight"] = (3 * width, width)
        shapes[f"{name}.attention.out.weight"] = (width, width)
        shapes[f"{name}.norm2.weight"] = (width,)
        shapes[f"{name}.mlp.up.weight"] = (4 * width, width)
        shapes[f"{name}.mlp.down.weight"] = (width, 4 * width)
    shapes["norm.weight"] = (width,)

    noise = _noise(NOISE_NBYTES)
    start = 0

    def leaf(shape: tuple[int, ...]) -> Any:
        nonlocal start
        n_values = math.prod(shape)
        if n_values >= noise.size // 2:
            return make(np.resize(noise, shape))
        start = (start + 4099) % (noise.size // 2)
        return make(noise[start : start + n_values].reshape(shape))

    tree: Tree = {
        "model": {name: leaf(shape) for name, shape in shapes.items()},
        "optimizer": {
            "state": {
                index: {
                    "step": make(np.full((), 1000.0, np.float32)),
                    "exp_avg": leaf(shape),
                    "exp_avg_sq": leaf(shape),
                }
                for index, shape in enumerate(shapes.values())
            },
            "param_groups": [_param_group(len(shapes))],
        },
        "rng": make(noise[:1264]),
        "step": 1000,
    }
    return f"{N_LAYERS}-layer decoder of width {width} with AdamW moments", tree


def _param_group(n_parameters: int) -> Tree:
    return {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "params": list(range(n_parameters)),
    }


def _noise(nbytes: int) -> Floats:
    return np.random.default_rng(0).standard_normal(nbytes // 4, dtype=np.float32) * np.float32(0.02)
