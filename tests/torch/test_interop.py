"""Strangers read what a PyTorch run saved: stock Orbax and stock TensorStore give back the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import torch

import tierkeep_torch as tk
from tests.torch.compare import as_bytes, from_bytes
from tierkeep.format import dtypes
from tierkeep.options import SaveOptions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax warns of its own deprecations

KEPT = sorted(
    (d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")), key=str
)


def state() -> dict[str, Any]:
    shared = torch.arange(2000.0).reshape(40, 50)
    return {
        "model": torch.nn.BatchNorm1d(7).state_dict(),
        "tied": [shared, shared],
        "view": shared[::2, 1:3].t(),
        "half": torch.randn(33).bfloat16(),
        "wide": torch.tensor([2**40 + 1, -1]),
        "mask": torch.tensor([True, False]),
        "z": torch.randn(3, dtype=torch.complex64),
        "empty": torch.zeros(0, 3),
        "0d": torch.tensor(2.5, dtype=torch.float64),
        "np": np.arange(5, dtype=np.uint16),
        "n": 3,
        "lr": 0.5,
        "flag": True,
        "name": "run é",
        "none": None,
        "inner": {"t": (torch.ones(2), {})},
    }


def check(found: Any, saved: Any) -> None:
    """`found` holds `saved` as Orbax knows it: lists for tuples, string keys, numpy arrays."""
    if isinstance(saved, torch.Tensor):
        array = np.asarray(found)
        assert array.shape == tuple(saved.shape)
        assert array.tobytes() == as_bytes(saved)
    elif isinstance(saved, np.ndarray):
        np.testing.assert_array_equal(np.asarray(found), saved)
    elif isinstance(saved, dict):
        assert set(found) == {str(key) for key in saved}
        for key, value in saved.items():
            check(found[str(key)], value)
    elif isinstance(saved, list | tuple):
        assert len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            check(one, other)
    else:
        assert found == saved


@pytest.mark.parametrize("declared", [True, False])
def test_orbax_restores_a_saved_state_without_a_target(declared: bool, tmp_path: Path) -> None:
    saved = state()
    tk.save(saved, tmp_path / "c", options=SaveOptions(declare_crc=declared, chunk_nbytes=1000))
    check(ocp.StandardCheckpointer().restore(tmp_path / "c"), saved)
    check(ocp.PyTreeCheckpointer().restore(tmp_path / "c"), saved)


def test_orbax_restores_into_a_target_of_its_own(tmp_path: Path) -> None:
    saved = {"w": torch.randn(8, 3), "b": {"n": torch.arange(4, dtype=torch.int32)}, "tuple": [torch.ones(2)]}
    tk.save(saved, tmp_path / "c")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    struct: Any = jax.ShapeDtypeStruct
    target = jax.tree.map(lambda t: struct(t.shape, str(t.dtype).removeprefix("torch."), sharding=sharding), saved)
    found = ocp.StandardCheckpointer().restore(tmp_path / "c", target)
    assert isinstance(found["w"], jax.Array)
    check(found, saved)
    check(ocp.StandardCheckpointer().restore(tmp_path / "c", jax.tree.map(lambda t: np.zeros_like(t), saved)), saved)


def test_an_orbax_manager_takes_a_root_for_its_own(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        for step in (1, 20):
            checkpointer.save(step, {"w": torch.full((3,), float(step)), "step": step})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert sorted(manager.all_steps()) == [1, 20]
        assert manager.latest_step() == 20
        check(manager.restore(1), {"w": torch.full((3,), 1.0), "step": 1})
        check(manager.restore(20, args=ocp.args.StandardRestore()), {"w": torch.full((3,), 20.0), "step": 20})
    with tk.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:  # and it left it as it was
        assert checkpointer.steps() == [1, 20]
        assert checkpointer.restore()["step"] == 20


def test_an_orbax_manager_saves_on_where_we_stopped(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, args=ocp.args.StandardSave({"w": np.full(3, 2.0, np.float32)}))
        manager.wait_until_finished()
    with tk.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        assert_steps = checkpointer.steps()
        assert 1 in assert_steps
        assert checkpointer.restore(1)["w"].all()


def open_array(path: Path, name: str) -> Any:
    return ts.open(
        {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{path}/", "path": name}}, open=True
    ).result()


# dtype-size-table-stale, extended-float-via-npy: what zarr3 lacks is seen as integers of the width
def test_tensorstore_reads_every_torch_dtype_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    saved = {}
    for dtype in KEPT:
        data = rng.integers(0, 2 if dtype is torch.bool else 8, 12 * dtype.itemsize, np.uint8)
        saved[str(dtype).removeprefix("torch.")] = from_bytes(data.tobytes(), dtype, (3, 4))
    tk.save(saved, tmp_path / "c")
    for base in (tmp_path / "c", tmp_path / "c" / "ocdbt.process_0"):
        for name, tensor in saved.items():
            array = open_array(base, f"{name}/")
            assert array.dtype.name == dtypes.lookup(name).zarr
            assert array.read().result().tobytes() == as_bytes(tensor), name


def test_tensorstore_sees_tied_leaves_views_and_odd_names(tmp_path: Path) -> None:
    saved = {"a": torch.arange(6.0).reshape(2, 3), "é/b c": torch.ones(2), "x" * 300: torch.zeros(0, 2)}
    tk.save({**saved, "t": saved["a"], "v": saved["a"].t()}, tmp_path / "c")
    for name, tensor in {**saved, "t": saved["a"], "v": saved["a"].t()}.items():
        array = open_array(tmp_path / "c", f"{name}/").read().result()
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == as_bytes(tensor)


# crc-not-verified-on-load: stock readers verify too
def test_a_flipped_bit_is_seen_by_stock_readers(tmp_path: Path) -> None:
    tk.save({"a": torch.arange(3000.0)}, tmp_path / "c")
    image = max((p for p in (tmp_path / "c").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(image.read_bytes())
    data[500] ^= 1
    image.write_bytes(data)
    with pytest.raises(ValueError, match=r"(?i)crc32c|checksum|digest"):
        open_array(tmp_path / "c", "a/").read().result()
