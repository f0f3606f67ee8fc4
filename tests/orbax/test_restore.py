"""What a target can ask for: other shardings and dtypes, parts, Orbax's own metadata; and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests.jax import trees
from tests.orbax import states
from tierkeep.errors import CorruptCheckpointError, MismatchError
from tierkeep_jax.orbax import Handler, Restore, Save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STATE = states.training()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("restore") / "root"
    with states.manager(root) as manager:
        manager.save(0, args=Save(STATE))
    return root / "0" / "default"


@pytest.fixture
def restore(step: Path) -> Iterator[Callable[..., Any]]:
    handler = Handler()
    yield lambda item=None, **more: handler.restore(step, args=Restore(item, **more))
    handler.close()


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    made: Any = jax.ShapeDtypeStruct
    return made(shape, dtype, sharding=sharding)


def test_without_a_target_every_array_comes_back_on_its_own_sharding(restore: Callable[..., Any]) -> None:
    found = restore()
    trees.assert_same(found, STATE)
    assert found["params"]["w"].sharding == STATE["params"]["w"].sharding
    assert found["params"]["b"].sharding == STATE["params"]["b"].sharding


def test_arrays_come_back_on_the_target_s_shardings(restore: Callable[..., Any]) -> None:
    other = jax.sharding.NamedSharding(trees.mesh(2), jax.sharding.PartitionSpec("x"))
    target = trees.specs(STATE)
    target["params"] |= {"w": struct((16, 8), np.float32, other), "b": jax.device_put(np.zeros(8, "bfloat16"), other)}
    found = restore(target)
    trees.assert_same(found, STATE)
    assert found["params"]["w"].sharding == other == found["params"]["b"].sharding


def test_a_target_without_shardings_gets_those_of_the_checkpoint_and_numpy_for_numpy(
    restore: Callable[..., Any],
) -> None:
    target = jax.eval_shape(lambda: {key: value for key, value in STATE.items() if key not in ("step", "rate")})
    target |= {"host": struct((7, 2), np.int64), "step": 0, "rate": 0.0}
    found = restore(target)
    expected = {key: STATE[key] for key in found}
    trees.assert_same(*(jax.tree.map(lambda leaf: leaf, tree) for tree in (found, expected)))
    assert found["params"]["w"].sharding == STATE["params"]["w"].sharding


def test_orbax_s_metadata_is_a_target(step: Path, restore: Callable[..., Any]) -> None:
    handler = Handler()
    trees.assert_same(restore(handler.metadata(step)), restore(handler.metadata(step).tree))
    states.assert_same_to_stock(restore(handler.metadata(step)), STATE)


def test_an_array_is_converted_to_the_target_s_dtype_unless_that_is_forbidden(restore: Callable[..., Any]) -> None:
    target = trees.specs(STATE)
    target["params"]["w"] = struct((16, 8), np.float16)
    target["host"] = np.zeros((7, 2), np.float32)
    found = restore(target)
    assert found["params"]["w"].dtype == np.float16
    np.testing.assert_array_equal(np.asarray(found["params"]["w"]), np.asarray(STATE["params"]["w"]).astype(np.float16))
    np.testing.assert_array_equal(found["host"], STATE["host"].astype(np.float32))
    with pytest.raises(MismatchError, match=r"params\.w: float32 in the checkpoint, float16"):
        restore(target, dtype="error")


def test_a_part_is_restored_and_what_the_target_lacks_is_an_error_otherwise(restore: Callable[..., Any]) -> None:
    target = {"params": {"b": trees.specs(STATE)["params"]["b"]}, "step": 0}
    expected = {"params": {"b": STATE["params"]["b"]}, "step": STATE["step"]}
    trees.assert_same(restore(target, partial_restore=True), expected)
    with pytest.raises(MismatchError, match=r"params\.w"):
        restore(target)
    with pytest.raises(MismatchError, match="absent"):
        restore(target | {"absent": struct((2,), np.float32)}, partial_restore=True)


def test_leaves_that_stand_as_placeholders_or_none_are_not_read(restore: Callable[..., Any]) -> None:
    target = trees.specs(STATE)
    target["params"] |= {"w": ..., "scale": None}
    target["step"] = ...
    found = restore(target)
    assert (found["params"]["w"], found["params"]["scale"], found["step"]) == (..., None, ...)
    trees.assert_same(found["params"]["b"], STATE["params"]["b"])


def test_a_shape_that_differs_is_an_error_and_is_cut_where_orbax_is_told_to(restore: Callable[..., Any]) -> None:
    target = {key: value for key, value in trees.specs(STATE).items() if key != "nothing"} | {"nothing": None}
    target["params"]["w"] = struct((4, 8), np.float32, STATE["params"]["w"].sharding)
    with pytest.raises(MismatchError, match=r"params\.w: \(16, 8\) in the checkpoint"):
        restore(target)
    found = restore(target, strict=False)
    np.testing.assert_array_equal(np.asarray(found["params"]["w"]), np.asarray(STATE["params"]["w"])[:4])


def test_devices_that_are_not_there_are_told_and_a_fallback_takes_their_place(
    step: Path, restore: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: few)
    with pytest.raises(ValueError, match="Topology mismatch"):
        restore()
    fallback = jax.sharding.SingleDeviceSharding(few[1])
    found = restore(fallback_sharding=fallback)
    trees.assert_same(found, STATE)
    assert found["params"]["w"].sharding == fallback


class Carried(NamedTuple):
    count: Any
    state: Any


@flax.struct.dataclass
class Training:
    params: Any
    carried: Any


def test_classes_of_the_target_are_made_again(tmp_path: Path) -> None:
    params = {"w": jax.numpy.arange(6.0).reshape(2, 3), "b": jax.numpy.zeros(3)}
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)
    state = Training(params, Carried(jax.numpy.int32(3), optimizer))
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save(state))
        for target in (state, jax.eval_shape(lambda: state)):
            found = manager.restore(0, args=Restore(target))
            structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(state)]
            assert structures[0] == structures[1]
            jax.tree.map(trees.assert_same, found, state)


def test_the_order_of_a_target_s_keys_is_kept(restore: Callable[..., Any]) -> None:
    target = dict(reversed(trees.specs(STATE).items()))
    assert list(restore(target)) == list(target)


def test_dtypes_of_save_args_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    state = {"w": jax.numpy.arange(4.0), "host": np.arange(3.0), "step": 3, "same": jax.numpy.ones(2)}
    wanted = {
        "w": ocp.SaveArgs(dtype=np.dtype("bfloat16")),
        "host": ocp.SaveArgs(dtype=np.dtype(np.float32)),
        "step": ocp.SaveArgs(dtype=np.dtype(np.int16)),
        "same": None,
    }
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save(state, save_args=wanted))
        found = manager.restore(0, args=Restore())
    assert [str(found[name].dtype) for name in state] == ["bfloat16", "float32", "int16", "float32"]
    np.testing.assert_array_equal(np.asarray(found["w"], np.float32), np.arange(4.0))
    np.testing.assert_array_equal(found["host"], np.arange(3.0))
    assert found["step"] == 3


@pytest.mark.parametrize(
    ("leaf", "save_args"),
    [
        pytest.param(jax.numpy.arange(3.0), ocp.SaveArgs(dtype=np.dtype(np.float64)), id="a dtype that jax lacks"),
        pytest.param(jax.random.key(0), ocp.SaveArgs(dtype=np.dtype(np.float32)), id="a key"),
        pytest.param("text", ocp.SaveArgs(dtype=np.dtype(np.float32)), id="a string"),
        pytest.param(jax.numpy.arange(3.0), ocp.SaveArgs(aggregate=True), id="one file for all"),
    ],
)
def test_save_args_that_cannot_be_honoured_are_refused(leaf: Any, save_args: Any, tmp_path: Path) -> None:
    handler = Handler()
    tmp_path.joinpath("item").mkdir()
    with pytest.raises(ValueError, match="SaveArgs"):
        handler.save(tmp_path / "item", args=Save({"leaf": leaf}, save_args={"leaf": save_args}))
    assert not any((tmp_path / "item").iterdir())


class Measured:
    """Not an array, but numpy makes one of it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.arange(4, dtype=dtype or np.int16)


def test_what_numpy_makes_an_array_of_is_one(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save({"measured": Measured(), "n": 1}))
        trees.assert_same(manager.restore(0, args=Restore()), {"measured": np.arange(4, dtype=np.int16), "n": 1})


def test_a_flipped_bit_is_told_and_not_restored(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save({"w": jax.numpy.arange(4096.0)}))
        manager.wait_until_finished()
        images = list((tmp_path / "0" / "default" / "ocdbt.process_0" / "d").iterdir())
        image = max(images, key=lambda path: path.stat().st_size)
        data = bytearray(image.read_bytes())
        data[1000] ^= 1
        image.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="w"):
            manager.restore(0, args=Restore())
