"""Tensors of every kind: their own elements, whatever memory they lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tierkeep_torch as tk
from tests.torch.compare import as_bytes, assert_same
from tierkeep.errors import InvalidStateError, MismatchError, UnsupportedLeafError
from tierkeep.options import KIB, SaveOptions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:(Sparse|.*nested|.*quantiz):UserWarning")


def disk_nbytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


# broadcast-stride0-view, fortran-order-garbage
@pytest.mark.parametrize(
    "view",
    [
        torch.arange(2.0).expand(4, 2),
        torch.tensor(3.0).expand(5),
        torch.arange(6.0).as_strided((3, 3), (1, 1)),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12.0)[::2],
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.arange(12.0)[4:9],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 2, dtype=torch.complex128).t().conj(),
    ],
    ids=[
        "expand",
        "expand0d",
        "overlap",
        "t",
        "permute",
        "step",
        "columns",
        "slice",
        "channels_last",
        "conj",
        "neg",
        "conj_t",
    ],
)
def test_a_view_is_saved_as_the_elements_it_shows_and_comes_back_on_its_own(view: torch.Tensor, tmp_path: Path) -> None:
    tk.save({"v": view}, tmp_path / "c")
    found = tk.load(tmp_path / "c")["v"]
    assert_same(found, view)
    assert not found.is_conj()
    assert not found.is_neg()
    found.zero_()  # writable, and no element is shared with another
    found.view(-1)[0] = 1
    assert found.count_nonzero() == 1


# broadcast-stride0-view, fortran-order-garbage
@pytest.mark.parametrize(
    "array",
    [
        np.broadcast_to(np.arange(2.0), (4, 2)),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::-1],
        np.arange(12).reshape(3, 4)[::-2, ::2],
        np.lib.stride_tricks.as_strided(np.arange(6.0), (3, 3), (8, 8)),
    ],
    ids=["broadcast", "fortran", "transposed", "reversed", "strided", "overlap"],
)
def test_a_numpy_view_is_saved_as_the_elements_it_shows(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    tk.save({"v": array}, tmp_path / "c")
    found = tk.load(tmp_path / "c")["v"]
    assert_same(found, np.ascontiguousarray(array))
    found[...] = 0
    found.flat[0] = 1
    assert np.count_nonzero(found) == 1


# fortran-order-garbage: as a target too
@pytest.mark.parametrize("make", [lambda s: torch.zeros(s[::-1]).t(), lambda s: torch.zeros(s[0] * 2, s[1])[::2]])
def test_a_strided_target_is_filled_where_it_is(make: Any, tmp_path: Path) -> None:
    saved = torch.randn(30, 50)
    tk.save({"v": saved}, tmp_path / "c", options=SaveOptions(chunk_nbytes=KIB))
    target = make((30, 50))
    place = target.data_ptr()
    tk.load(tmp_path / "c", {"v": target})
    assert torch.equal(target, saved)
    assert target.data_ptr() == place


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (torch.zeros(2).expand(4, 2), "share memory"),
        (torch.zeros(6).as_strided((4, 2), (1, 1)), "share memory"),
        (torch.zeros(4, 2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(4, 2, device="meta"), "meta"),
    ],
)
def test_a_target_that_cannot_be_filled_is_told_by_name(target: torch.Tensor, told: str, tmp_path: Path) -> None:
    tk.save({"in": [torch.ones(4, 2)], "a": torch.ones(1)}, tmp_path / "c")
    into: dict[str, Any] = {"in": [target], "a": torch.zeros(1)}
    with pytest.raises(MismatchError, match=told) as caught:
        tk.load(tmp_path / "c", into, dtype="cast")
    assert caught.value.structure[0].startswith("in.0: ")
    assert not into["a"].any()


# slice-saves-whole-storage
def test_a_slice_costs_only_its_own_bytes(tmp_path: Path) -> None:
    whole = torch.zeros(1_000_000)
    report = tk.save({"part": whole[:1000]}, tmp_path / "c")
    assert report.nbytes == 4000
    assert disk_nbytes(tmp_path / "c") < 4000 + 16 * KIB
    parts = dict(enumerate(torch.chunk(torch.arange(100_000.0), 10)))
    assert tk.save(parts, tmp_path / "d").nbytes == 400_000
    assert disk_nbytes(tmp_path / "d") < 400_000 + 10 * 4096 + 32 * KIB
    assert_same(tk.load(tmp_path / "d"), {k: v.clone() for k, v in parts.items()})


# views-of-one-flat-buffer
def test_views_of_one_flat_buffer_are_ordinary_leaves_and_overlaps_are_saved_by_value(tmp_path: Path) -> None:
    flat = torch.arange(100.0)
    state = {f"p{n}": flat[10 * n : 10 * n + 10].view(2, 5) for n in range(10)}
    assert tk.save(state, tmp_path / "c").nbytes == 400
    assert_same(tk.load(tmp_path / "c"), state)
    overlap = {"a": flat[:10], "b": flat[5:15]}
    assert tk.save(overlap, tmp_path / "d").nbytes == 80
    found = tk.load(tmp_path / "d")
    found["a"].zero_()
    assert torch.equal(found["b"], overlap["b"])


# tied-weights-save
def test_one_tensor_under_two_names_is_stored_once_and_is_one_again(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    report = tk.save({"a": {"w": shared}, "b": [shared, shared.view(1000)], "c": shared.clone()}, tmp_path / "c")
    assert report.nbytes == 8000
    found = tk.load(tmp_path / "c")
    assert found["a"]["w"] is found["b"][0]
    assert found["b"][1].data_ptr() == found["b"][0].data_ptr()
    assert found["c"].data_ptr() != found["a"]["w"].data_ptr()
    assert torch.equal(found["c"], shared)
    assert dict(tk.load(tmp_path / "c", dry_run=True).tied) == {"b.0": "a.w", "b.1": "a.w"}


# tied-weights-save: equal but distinct, and numpy
def test_equal_tensors_that_are_distinct_stay_distinct(tmp_path: Path) -> None:
    array = np.arange(5.0)
    tk.save({"a": torch.ones(4), "b": torch.ones(4), "n": array, "m": array}, tmp_path / "c")
    found = tk.load(tmp_path / "c")
    found["a"].zero_()
    assert found["b"].all()
    assert found["n"] is found["m"]


# tied-weights-restore-missing
def test_tied_tensors_restore_into_tied_and_into_separate_targets(tmp_path: Path) -> None:
    shared = torch.randn(5)
    tk.save({"a": shared, "b": shared}, tmp_path / "c")
    one = torch.zeros(5)
    tk.load(tmp_path / "c", {"a": one, "b": one})
    assert torch.equal(one, shared)
    into = {"a": torch.zeros(5), "b": torch.zeros(5)}
    tk.load(tmp_path / "c", into)
    assert torch.equal(into["a"], shared)
    assert torch.equal(into["b"], shared)
    only = tk.load(tmp_path / "c", keys=["b"])
    assert_same(only, {"b": shared})


def test_gradient_flags_and_parameters_are_kept(tmp_path: Path) -> None:
    state = {
        "p": torch.nn.Parameter(torch.randn(2)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "asks": torch.randn(2, requires_grad=True),
        "plain": torch.randn(2),
        "sparse": torch.nn.Parameter(torch.eye(3).to_sparse()),
    }
    tk.save(state, tmp_path / "c")
    assert_same(tk.load(tmp_path / "c"), state)
    target = torch.nn.Parameter(torch.zeros(2))
    tk.load(tmp_path / "c", {"p": target}, keys=["p"])
    assert torch.equal(target, state["p"])


def test_a_restore_in_place_is_seen_by_autograd(tmp_path: Path) -> None:
    tk.save({"w": torch.ones(2)}, tmp_path / "c")
    w = torch.zeros(2, requires_grad=True)
    loss = (w * w).sum()
    tk.load(tmp_path / "c", {"w": w})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_save_leaves_storages_as_they_were(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    tk.save({"t": tensor}, tmp_path / "c")
    tk.load(tmp_path / "c", {"t": tensor})
    tensor.untyped_storage().resize_(0)  # FSDP frees and allocates its parameters so
    assert tensor.untyped_storage().nbytes() == 0


def test_a_tensor_whose_storage_was_freed_is_refused_by_name(tmp_path: Path) -> None:
    freed, cut = torch.ones(4), torch.ones(100)
    views = [cut[::2], cut[50:]]
    freed.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(8)
    tk.save({"t": torch.ones(4)}, tmp_path / "c")
    for bad in (freed, cut, *views):
        with pytest.raises(UnsupportedLeafError, match=r"'in.t': the tensor's storage is smaller"):
            tk.save({"in": {"t": bad}}, tmp_path / "d")
    with pytest.raises(MismatchError, match="t: the tensor's storage is smaller"):
        tk.load(tmp_path / "c", {"t": freed})


SPARSE = ["coo", "uncoalesced", "hybrid", "none", "bf16", "csr", "csc", "bsr", "bsc", "int32"]


def sparse(name: str) -> torch.Tensor:
    dense = torch.tensor([[0.0, 2, 0], [3, 0, 4]])
    with torch.sparse.check_sparse_tensor_invariants():
        if name == "coo":
            return dense.to_sparse()
        if name == "uncoalesced":
            return torch.sparse_coo_tensor(torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2, 3]), (4,))
        if name == "hybrid":
            return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3))
        if name == "none":
            return torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (4, 4))
        if name == "bf16":
            return torch.eye(3, dtype=torch.bfloat16).to_sparse()
        if name == "csr":
            return dense.to_sparse_csr()
        if name == "csc":
            return dense.to_sparse_csc()
        if name == "bsr":
            return torch.eye(4).to_sparse_bsr((2, 2))
        if name == "bsc":
            return torch.eye(4, dtype=torch.float64).to_sparse_bsc((2, 2))
        rows, columns = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        return torch.sparse_csr_tensor(rows, columns, torch.ones(2), (2, 2))


# tensor-subclass-quantised
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_kept_as_their_parts(name: str, tmp_path: Path) -> None:
    saved = sparse(name)
    tk.save({"s": saved, "again": [saved]}, tmp_path / "c")
    assert_same(tk.load(tmp_path / "c"), {"s": saved, "again": [saved]})


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_target_takes_another_number_of_elements(name: str, tmp_path: Path) -> None:
    saved = sparse(name)
    tk.save({"s": saved}, tmp_path / "c")
    target = {"s": saved * 0 if name == "int32" else torch.zeros_like(saved)}
    own = target["s"]
    tk.load(tmp_path / "c", target)
    assert target["s"] is own
    assert_same(own, saved)


def test_a_sparse_target_of_another_size_dtype_or_layout_is_a_mismatch(tmp_path: Path) -> None:
    tk.save({"s": sparse("coo"), "t": torch.ones(1)}, tmp_path / "c")
    for bad, kind in (
        (torch.zeros(3, 3).to_sparse(), "shape"),
        (torch.zeros(2, 3, dtype=torch.float64).to_sparse(), "dtype"),
        (torch.zeros(2, 3).to_sparse_csr(), "structure"),
        (torch.zeros(2, 3), "structure"),
    ):
        into = {"s": bad, "t": torch.zeros(1)}
        with pytest.raises(MismatchError) as caught:
            tk.load(tmp_path / "c", into)
        assert getattr(caught.value, kind)
        assert not into["t"].any()
        assert not bad.to_dense().any()
    wide = torch.zeros(2, 3, dtype=torch.float64).to_sparse()
    tk.load(tmp_path / "c", {"s": wide, "t": torch.zeros(1)}, dtype="cast")
    assert torch.equal(wide.to_dense(), sparse("coo").to_dense().double())


class Wrapper(torch.Tensor):
    """A wrapper subclass with two inner tensors, such as quantisation libraries use."""

    @staticmethod
    def __new__(cls: type[Wrapper], low: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32)

    def __init__(self, low: torch.Tensor, scale: torch.Tensor) -> None:
        self.low, self.scale = low, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["low", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(inner["low"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(str(func))


class Plain(torch.Tensor):
    """A subclass with ordinary memory: its class would be lost."""


UNSUPPORTED = ["wrapper", "subclass", "fake", "meta", "meta_sparse", "nested", "jagged", "lazy", "mkldnn", "generator"]


def unsupported() -> dict[str, Any]:
    with FakeTensorMode():
        fake = torch.ones(3)
    ones = [torch.ones(2), torch.ones(3)]
    return {
        "wrapper": Wrapper(torch.ones(2, dtype=torch.int8), torch.ones(())),
        "subclass": torch.ones(2).as_subclass(Plain),
        "fake": fake,
        "meta": torch.ones(3, device="meta"),
        "meta_sparse": torch.eye(3).to_sparse().to("meta"),
        "nested": torch.nested.nested_tensor(ones),
        "jagged": torch.nested.nested_tensor(ones, layout=torch.jagged),
        "lazy": torch.nn.UninitializedParameter(),
        "mkldnn": torch.ones(2, 2).to_mkldnn(),
        "generator": torch.Generator(),
    }


# tensor-subclass-quantised
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_tensor_without_plain_elements_is_refused_by_name_before_a_byte_is_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        tk.save({"a": torch.ones(2), "b": ({"c": unsupported()[kind]},)}, tmp_path / "root" / "c")
    assert caught.value.key.startswith("b.0.c")
    assert "b.0.c" in str(caught.value)
    assert "Nothing was written" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_restore_to_the_meta_device_is_refused(tmp_path: Path) -> None:
    tk.save({"a": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(InvalidStateError, match=r"'a'.*meta"):
        tk.load(tmp_path / "c", device="meta")


# zero-length-axis-chunks, zero-size-array
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 5), (), (1,), (1, 1, 1)])
def test_zero_size_and_0d_tensors_are_kept_beside_others(shape: tuple[int, ...], tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "z": torch.ones(shape), "i": torch.ones(shape, dtype=torch.uint8)}
    tk.save(state, tmp_path / "c", options=SaveOptions(chunk_nbytes=1))
    assert_same(tk.load(tmp_path / "c"), state)
    tk.save({"only": torch.ones(shape)}, tmp_path / "d")
    assert_same(tk.load(tmp_path / "d"), {"only": torch.ones(shape)})
    tk.load(tmp_path / "d", {"only": torch.zeros(shape)})
    with pytest.raises(MismatchError):
        tk.load(tmp_path / "d", {"only": torch.zeros((*shape, 2))})


@pytest.mark.parametrize("chunk", [1, 100, 4096, 10_000])
def test_any_chunk_size_gives_the_same_tensors(chunk: int, tmp_path: Path) -> None:
    state = {"a": torch.randn(17, 31), "b": torch.randn(5, 3, 7).bfloat16(), "c": torch.randn(2000)}
    tk.save(state, tmp_path / "c", options=SaveOptions(chunk_nbytes=chunk))
    assert_same(tk.load(tmp_path / "c"), state)
    assert as_bytes(tk.load(tmp_path / "c", keys=["c"])["c"]) == as_bytes(state["c"])
