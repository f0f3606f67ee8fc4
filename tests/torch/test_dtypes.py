"""Every dtype is kept bit for bit, or refused before a byte is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tierkeep_torch as tk
from tests.torch.compare import as_bytes, assert_same, from_bytes
from tierkeep.errors import MismatchError, UnsupportedLeafError
from tierkeep.format import dtypes

if TYPE_CHECKING:
    from pathlib import Path

ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in ALL if str(dtype).startswith("torch.q")]
KEPT = [dtype for dtype in ALL if dtype not in QUANTIZED]
ML_DTYPES = sorted(name for name in vars(ml_dtypes) if name.startswith(("bfloat", "float", "int", "uint")))
SHAPES = [(), (1,), (0,), (3, 0, 5), (7,), (3, 5)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(len(shape)).integers(0, 2 if dtype is torch.bool else 256, nbytes, np.uint8)
    return from_bytes(data.tobytes(), dtype, shape)


# dtype-size-table-stale, bf16-through-numpy, zero-size-array
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", KEPT, ids=str)
def test_every_dtype_comes_back_bit_for_bit_in_every_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {str(shape): random_tensor(dtype, shape) for shape in SHAPES}
    state["strided"] = random_tensor(dtype, (6, 4))[::2, 1:3].t()
    report = tk.save(state, tmp_path / "c")
    assert report.nbytes == sum(t.numel() * dtype.itemsize for t in state.values())
    assert_same(tk.load(tmp_path / "c"), state)

    into = {key: torch.empty_like(value) for key, value in state.items()}
    places = {key: value.data_ptr() for key, value in into.items()}
    assert tk.load(tmp_path / "c", into) is into
    assert_same(into, state)
    assert {key: value.data_ptr() for key, value in into.items()} == places


# dtype-size-table-stale, tensor-subclass-quantised
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_quantized_tensor_is_refused_by_name_before_a_byte_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    bad = torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=dtype)
    with pytest.raises(UnsupportedLeafError, match=r"quantized|int_repr") as caught:
        tk.save({"fine": torch.ones(1), "inner": [bad]}, tmp_path / "c")
    assert caught.value.key == "inner.0"
    assert list(tmp_path.iterdir()) == []


def test_no_torch_dtype_is_left_out() -> None:
    assert {dtype for dtype in KEPT if str(dtype).removeprefix("torch.") not in dtypes._TABLE} == set()


# bf16-through-numpy
def test_bfloat16_is_kept_whatever_its_gradient_and_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        inferred = torch.full((3,), 1.5, dtype=torch.bfloat16)
    asks = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    state = {
        "0d": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "strided": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()[::2],
        "asks": asks,
        "grown": asks * 2,
        "inferred": inferred,
    }
    tk.save(state, tmp_path / "c")
    loaded = tk.load(tmp_path / "c")
    assert not loaded["grown"].requires_grad  # it is no leaf of the graph: only its value is state
    assert_same(loaded, state | {"grown": state["grown"].detach()})
    with torch.inference_mode():
        target = torch.zeros(3, dtype=torch.bfloat16)
    tk.load(tmp_path / "c", {"inferred": target}, keys=["inferred"])
    assert torch.equal(target, inferred)


# extended-float-via-npy
@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_ml_dtypes_array_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    state = {str(shape): np.zeros(shape, dtype) for shape in SHAPES}
    state["values"] = np.array([0, 1, 1, 0, 1]).astype(dtype)
    tk.save(state, tmp_path / "c")
    assert_same(tk.load(tmp_path / "c"), state)
    into = {key: np.ones_like(value) for key, value in state.items()}
    tk.load(tmp_path / "c", into)
    assert_same(into, state)


# extended-float-via-npy
@pytest.mark.parametrize("kind", ["?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "F", "D"])
def test_every_plain_numpy_dtype_and_byte_order_is_kept(kind: str, tmp_path: Path) -> None:
    values = np.array([0, 1, 1], kind)
    state = {"array": values, "scalar": values[1], "0d": np.array(1, kind)}
    tk.save(state | {"swapped": values.astype(values.dtype.newbyteorder(">"))}, tmp_path / "c")
    assert_same(tk.load(tmp_path / "c"), state | {"swapped": values})


@pytest.mark.parametrize("kind", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", "g", "G"])
def test_a_numpy_dtype_without_exact_form_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="'k'"):
        tk.save({"k": np.zeros(2, kind)}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# nan-payload-lost
@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.float32, [0x7FC00000, 0x7FA00000, 0xFFC00000, 0x7FC01234, 0x80000000, 0x00000001, 0x7F800000]),
        (torch.bfloat16, [0x7FC0, 0x7FA0, 0xFFC0, 0x7FC1, 0x8000, 0x0001]),
        (torch.float16, [0x7E00, 0x7D00, 0xFE00, 0x7E12, 0x8000, 0x0001]),
        (torch.float64, [0x7FF8000000000000, 0x7FF4000000000000, 0xFFF8000000000000, 0x7FF8000000001234]),
    ],
    ids=str,
)
def test_every_nan_keeps_its_payload_and_every_zero_its_sign(
    dtype: torch.dtype, patterns: list[int], tmp_path: Path
) -> None:
    data = b"".join(p.to_bytes(dtype.itemsize, "little") for p in patterns)
    state = {"t": from_bytes(data, dtype, (len(patterns),)), "all": from_bytes(data[: dtype.itemsize] * 9, dtype, (9,))}
    tk.save(state, tmp_path / "c")
    assert as_bytes(tk.load(tmp_path / "c")["t"]) == data
    assert_same(tk.load(tmp_path / "c"), state)


# nan-payload-lost: through complex types too, which numpy moves as themselves
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_keep_nan_payloads_in_both_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    half = dtype.itemsize // 2
    nan = {2: 0x7D01, 4: 0x7FA00001, 8: 0x7FF4000000000001}[half].to_bytes(half, "little")
    zero = (1 << (8 * half - 1)).to_bytes(half, "little")  # -0.0
    data = nan + zero + zero + nan
    tk.save({"t": from_bytes(data, dtype, (2,))}, tmp_path / "c")
    assert as_bytes(tk.load(tmp_path / "c")["t"]) == data
    into = {"t": torch.zeros(2, dtype=dtype)}
    tk.load(tmp_path / "c", into)
    assert as_bytes(into["t"]) == data


# same-memory-two-dtypes
def test_two_dtypes_over_one_memory_stay_two_leaves(tmp_path: Path) -> None:
    x = torch.randn(8)
    z = torch.randn(4, dtype=torch.complex64)
    state = {"x": x, "i": x.view(torch.int32), "z": z, "r": torch.view_as_real(z), "flat": x.view(2, 4)}
    tk.save(state, tmp_path / "c")
    assert_same(tk.load(tmp_path / "c"), state)
    into = {"x": torch.zeros(8), "i": torch.zeros(8, dtype=torch.int32)}
    tk.load(tmp_path / "c", into, keys=["x", "i"])
    assert_same(into, {"x": state["x"], "i": state["i"]})


# silent-dtype-cast-on-load
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.tensor([1.0000001, -2.5, 3e38]), torch.bfloat16),
        (torch.tensor([16777217], dtype=torch.int32), torch.float32),
        (torch.tensor([2**40 + 1]), torch.int32),
        (torch.tensor([0.1, 448.0]), torch.float8_e4m3fn),
        (torch.tensor([0.5, 1.5]).to(torch.float8_e5m2), torch.float32),
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), torch.float64),
        (torch.tensor([1 + 2j]), torch.complex128),
        (torch.tensor(True), torch.int64),
        (torch.tensor([1, 0]), torch.bool),
    ],
    ids=lambda v: str(v if isinstance(v, torch.dtype) else v.dtype),
)
def test_another_dtype_is_an_error_unless_a_cast_is_asked_for(
    saved: torch.Tensor, wanted: torch.dtype, tmp_path: Path
) -> None:
    tk.save({"w": {"k": saved}}, tmp_path / "c")
    into = {"w": {"k": torch.full(saved.shape, 1).to(wanted)}}
    before = into["w"]["k"].clone()
    with pytest.raises(MismatchError) as caught:
        tk.load(tmp_path / "c", into)
    (line,) = caught.value.dtype
    for told in ("w.k", str(saved.dtype).removeprefix("torch."), str(wanted).removeprefix("torch.")):
        assert told in line
    assert_same(into["w"]["k"], before)
    tk.load(tmp_path / "c", into, dtype="cast")
    assert_same(into["w"]["k"], saved.to(wanted))


@pytest.mark.parametrize(
    "stored", [d for d in KEPT if str(d) in ("torch.bits8", "torch.int4", "torch.complex64")], ids=str
)
def test_a_cast_that_torch_cannot_make_is_told_before_anything_is_touched(stored: torch.dtype, tmp_path: Path) -> None:
    tk.save({"a": torch.ones(3), "k": random_tensor(stored, (3,))}, tmp_path / "c")
    into = {"a": torch.zeros(3), "k": torch.zeros(3)}
    with pytest.raises(MismatchError, match=f"k: {stored}"):
        tk.load(tmp_path / "c", into, dtype="cast")
    assert not into["a"].any()


def test_numpy_and_torch_arrays_restore_into_each_other(tmp_path: Path) -> None:
    state: dict[str, Any] = {"t": torch.randn(3), "n": np.arange(4, dtype=np.int16)}
    tk.save(state, tmp_path / "c")
    into: dict[str, Any] = {"t": np.zeros(3, np.float32), "n": torch.zeros(4, dtype=torch.int16)}
    tk.load(tmp_path / "c", into)
    assert into["t"].tobytes() == as_bytes(state["t"])
    assert into["n"].tolist() == state["n"].tolist()
