"""What it means for a restored state to be the saved one: the same types, places and bits."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from tierkeep.tree import NamedMapping

__all__ = ["as_bytes", "assert_same", "from_bytes", "snapshot"]


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a dense tensor in C order, bit for bit."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.numel():
        return b""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.element_size())
    whole = plain.contiguous() if width is None else plain.view(width).contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor of these bits."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(dtype).reshape(shape)


def assert_same(found: Any, saved: Any, where: str = "state") -> None:
    """Fails where the two differ in type, structure, order of keys or any bit."""
    if isinstance(saved, NamedMapping):
        assert isinstance(found, NamedMapping), where
        assert found.type_name == saved.type_name, where
    assert type(found) is type(saved), f"{where}: {type(found)} for {type(saved)}"
    if isinstance(saved, torch.Tensor):
        assert (found.dtype, found.shape, found.layout) == (saved.dtype, saved.shape, saved.layout), where
        assert found.requires_grad == saved.requires_grad, where
        if saved.layout is torch.strided:
            assert as_bytes(found) == as_bytes(saved), where
        elif saved.layout is torch.sparse_coo:
            assert found.is_coalesced() == saved.is_coalesced(), where
            assert_same(found.detach()._indices(), saved.detach()._indices(), where)
            assert_same(found.detach()._values(), saved.detach()._values(), where)
        else:
            rows = saved.layout in (torch.sparse_csr, torch.sparse_bsr)
            for name in ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices"):
                assert_same(getattr(found.detach(), name)(), getattr(saved.detach(), name)(), f"{where}.{name}")
            assert_same(found.detach().values(), saved.detach().values(), where)
    elif isinstance(saved, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape), where
        assert found.tobytes() == saved.tobytes(), where
    elif isinstance(saved, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in saved], where
        for key, value in saved.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(saved, list | tuple) or type(saved).__name__ == "deque":
        assert len(found) == len(saved), where
        for number, (one, other) in enumerate(zip(found, saved, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(saved, float):
        assert struct.pack("<d", found) == struct.pack("<d", saved), where
    elif isinstance(saved, complex):
        assert struct.pack("<2d", found.real, found.imag) == struct.pack("<2d", saved.real, saved.imag), where
    else:
        assert found == saved, where


def snapshot(value: Any) -> Any:
    """A copy of a target, to compare it with afterwards."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.nn.Module):
        return snapshot(dict(value.state_dict()))
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(each) for each in value]
    return value.copy() if isinstance(value, np.ndarray) else value
