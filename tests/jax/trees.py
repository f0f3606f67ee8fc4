"""Random pytrees under random shardings, and a comparison that forgives nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.experimental
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tierkeep.format import dtypes
from tierkeep.tree import NamedMapping
from tierkeep_jax import place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Pair",
    "assert_same",
    "bits_of",
    "enable_x64",
    "jax_dtypes",
    "leaves",
    "mesh",
    "numpy_array",
    "plain",
    "shardings",
    "specs",
    "targets",
    "trees",
]

# A context; before jax 0.8 it has no other name than the second.
enable_x64: Any = getattr(jax if hasattr(jax, "enable_x64") else jax.experimental, "enable_x64")  # noqa: B009
DIMS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
MESHES = ((1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (1, 4), (2, 2), (2, 3), (2, 4), (4, 2), (8, 1), (2, 2, 2))
_SUB_BYTE = {"int1": 1, "int2": 2, "int4": 4, "uint1": 1, "uint2": 2, "uint4": 4, "float4_e2m1fn": 4}
ALL = tuple(
    name
    for name in [
        "bool",
        "int1",
        "int2",
        "int4",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint1",
        "uint2",
        "uint4",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float4_e2m1fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
    if not name.startswith(("int1", "uint1")) or name in ("int16", "uint16") or hasattr(ml_dtypes, name)
)
"""Every dtype of jax, 64-bit ones included."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Fields:
    """A dataclass that jax does not know: a container to tierkeep all the same."""

    one: Any
    two: Any


def jax_dtypes() -> list[str]:
    """What jax can hold as it is configured at the call."""
    return [name for name in ALL if place.holds(name)]


def numpy_array(dtype: str, shape: Sequence[int], seed: int) -> np.ndarray[Any, Any]:
    """Random bits: NaNs with payloads, infinities and subnormals among them."""
    found = dtypes.numpy_dtype(dtype)
    assert found is not None
    size = math.prod(shape)
    data = np.frombuffer(np.random.default_rng(seed).bytes(size * found.itemsize), np.uint8)
    if dtype == "bool":
        return (data & 1).astype(bool).reshape(shape)
    if dtype in _SUB_BYTE:
        width = _SUB_BYTE[dtype]
        if dtype.startswith("int"):
            signed = (data & (2**width - 1)).astype(np.int8)
            narrow: np.ndarray[Any, Any] = np.where(signed >= 2 ** (width - 1), signed - 2**width, signed).astype(found)
        elif dtype.startswith("uint"):
            narrow = (data & (2**width - 1)).astype(found)
        else:
            narrow = (data & 15).view(found)
        return narrow.reshape(shape)
    return data.view(found).reshape(shape).copy()


def mesh(*shape: int) -> Mesh:
    devices = jax.devices("cpu")[: math.prod(shape)]
    return Mesh(np.array(devices).reshape(shape), ("x", "y", "z")[: len(shape)])


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """One device, or a mesh of up to 8 with each axis of it splitting one of the array's, or none: then replicated."""
    if draw(st.booleans()):
        return SingleDeviceSharding(draw(st.sampled_from(jax.devices("cpu"))))
    grid = mesh(*draw(st.sampled_from(MESHES)))
    spec: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for name, n in draw(st.permutations(list(grid.shape.items()))):
        fits = [axis for axis, length in enumerate(left) if length % n == 0]
        axis = draw(st.sampled_from([None, *fits, *fits]))
        if axis is not None:
            spec[axis].append(name)
            left[axis] //= n
    return NamedSharding(grid, PartitionSpec(*(tuple(names) or None for names in spec)))


SHAPES = st.lists(st.sampled_from(DIMS), max_size=3).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def arrays(draw: st.DrawFn, names: Sequence[str]) -> jax.Array:
    data = numpy_array(draw(st.sampled_from(names)), draw(SHAPES), draw(SEEDS))
    array: jax.Array = jax.device_put(data, draw(shardings(data.shape)))
    return array


@st.composite
def numpy_arrays(draw: st.DrawFn, names: Sequence[str]) -> Any:
    data = numpy_array(draw(st.sampled_from(names)), draw(SHAPES), draw(SEEDS))
    return draw(st.sampled_from([data, np.asfortranarray(data), data[..., ::-1] if data.ndim else data[()]]))


@st.composite
def random_keys(draw: st.DrawFn) -> jax.Array:
    key = jax.random.key(draw(SEEDS), impl=draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"])))
    shape = draw(st.sampled_from([None, (2,), (2, 3)]))
    return key if shape is None else jax.random.split(key, shape)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.binary(max_size=8),
)
NAMES = st.text("abcXYZ_-é ", min_size=1, max_size=5)
KEYS = st.one_of(NAMES, st.integers(-3, 12))


def trees(names: Sequence[str], *, numpy_names: Sequence[str] = ALL, plain: bool = True) -> st.SearchStrategy[Any]:
    """Nests of containers around arrays of the dtypes `names`; with `plain`, around plain values and dataclasses too."""
    numpys = numpy_arrays(numpy_names)
    leaf = st.one_of(arrays(names), arrays(names), numpys if plain else numpys.map(np.asarray), random_keys())
    if plain:
        leaf = st.one_of(leaf, PLAIN)
    # A dataclass that jax does not know is a leaf to Orbax, and keys of two types have no order there.
    unknown, keys = ([Fields], KEYS) if plain else ([], NAMES)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=4).filter(_distinct),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            *(st.builds(cls, inner, inner) for cls in unknown),
        ),
        max_leaves=6,
    )


def _distinct(tree: dict[Any, Any]) -> bool:
    return len({str(key) for key in tree}) == len(tree)  # 0 and '0' are stored under one name: an error of its own


@st.composite
def targets(draw: st.DrawFn, tree: Any) -> Any:
    """The same tree with every jax array as a shape under another sharding, or as an array of zeros."""

    def target(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            sharding = draw(shardings(leaf.shape))
            if draw(st.booleans()):
                return jax.device_put(np.zeros(leaf.shape, leaf.dtype), sharding)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf

    return _map(target, tree)


def specs(tree: Any) -> Any:
    """The same tree with every jax array as its shape, dtype and sharding."""
    return _map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def _map(change: Any, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(change, value) for key, value in tree.items()}
    if isinstance(tree, Pair):
        return Pair(*(_map(change, value) for value in tree))
    if isinstance(tree, Fields):
        return Fields(_map(change, tree.one), _map(change, tree.two))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(change, value) for value in tree)
    return change(tree)


def plain(tree: Any) -> Any:
    """What a restore without a target gives for `tree`: classes as mappings that remember their names."""
    if isinstance(tree, Pair):
        return NamedMapping(f"{__name__}.Pair", {"left": plain(tree.left), "right": plain(tree.right)})
    if isinstance(tree, Fields):
        return NamedMapping(f"{__name__}.Fields", {"one": plain(tree.one), "two": plain(tree.two)})
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return type(tree)(map(plain, tree)) if isinstance(tree, list | tuple) else tree


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf that is neither None nor a container, by its storage name."""
    if isinstance(tree, Pair):
        tree = tree._asdict()
    if isinstance(tree, Fields):
        tree = vars(tree)
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, str(number)))
    elif tree is not None:
        yield ".".join(path), tree


def bits_of(leaf: Any) -> tuple[Any, ...]:
    """dtype, shape and bytes of an array or scalar of any framework; the implementation too for random keys."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(leaf)), *bits_of(jax.random.key_data(leaf))
    if type(leaf).__module__.startswith("torch"):
        return (
            str(leaf.dtype).removeprefix("torch."),
            tuple(leaf.shape),
            bytes(leaf.detach().untyped_storage().tolist()),
        )
    array = np.asarray(leaf)
    if array.dtype == object:  # an int past 64 bits, whose array would hold a pointer
        return type(leaf).__name__, (), repr(leaf).encode()
    return array.dtype.name, array.shape, array.tobytes()


def assert_same(found: Any, expected: Any, *, where: str = "") -> None:
    """Equal containers, types and bits; of two jax arrays, of any sharding, every shard holds what it should."""
    if isinstance(expected, jax.Array):
        assert isinstance(found, jax.Array), (where, type(found))
        assert bits_of(found) == bits_of(expected), where
        if not jax.numpy.issubdtype(found.dtype, jax.dtypes.prng_key):
            whole = np.asarray(expected)
            for shard in found.addressable_shards:
                assert bits_of(shard.data) == bits_of(whole[shard.index]), (where, shard.index)
        return
    assert type(found) is type(expected), (where, type(found), type(expected))
    if isinstance(expected, NamedMapping):
        assert found.type_name == expected.type_name, where
    if isinstance(expected, Fields):
        found, expected = vars(found), vars(expected)
    if isinstance(expected, dict):
        assert [(type(k), k) for k in found] == [(type(k), k) for k in expected], where
        for key, value in expected.items():
            assert_same(found[key], value, where=f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(itertools.zip_longest(found, expected)):
            assert_same(one, other, where=f"{where}.{number}")
    elif isinstance(expected, np.ndarray | np.generic | float | complex):
        assert bits_of(found) == bits_of(expected), where
    else:
        assert found == expected, where
