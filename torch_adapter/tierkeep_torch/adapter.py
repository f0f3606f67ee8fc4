"""PyTorch as the core sees it: tensors as leaves, modules and optimizers as the state they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierkeep.adapter import Branch, Destination, Stateful
from tierkeep.tree import Node, Value

from . import place, stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkeep.leaf import Leaf, LeafSpec

__all__ = ["TorchAdapter"]

_PLAIN = frozenset({bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset})
_SPARSE = {
    torch.sparse_coo: ("torch.sparse_coo", ("indices", "values", "size", "coalesced")),
    torch.sparse_csr: ("torch.sparse_csr", ("crow_indices", "col_indices", "values", "size")),
    torch.sparse_csc: ("torch.sparse_csc", ("ccol_indices", "row_indices", "values", "size")),
    torch.sparse_bsr: ("torch.sparse_bsr", ("crow_indices", "col_indices", "values", "size")),
    torch.sparse_bsc: ("torch.sparse_bsc", ("ccol_indices", "row_indices", "values", "size")),
}
_LAYOUTS = {kind: layout for layout, (kind, _) in _SPARSE.items()}


class TorchAdapter:
    """The adapter of `tierkeep_torch`. Holds no state."""

    name = "torch"
    orbax_type = "np.ndarray"
    in_place = True

    def expand(self, value: Any) -> Leaf | Branch | Stateful | Value | None:
        cls = type(value)
        if cls in _PLAIN:
            return None
        if isinstance(value, torch.Tensor):
            if value.layout in _SPARSE:
                return _sparse(value)
            return stage.leaf(value)
        if isinstance(value, torch.nn.Module):
            return Stateful(value.state_dict(), None if _is_plain(value) else value.load_state_dict, in_place=True)
        if cls is torch.Size:
            return Branch(Node("tuple", "torch.Size", (), ()), tuple(value))
        if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            if not callable(getattr(value, "load_state_dict", None)):
                raise TypeError(f"an object of type {cls.__qualname__} has state_dict() but no load_state_dict()")
            return Stateful(value.state_dict(), value.load_state_dict, in_place=False)
        return None

    def encode_value(self, value: Any) -> Any:
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            kind, name = str(type(value).__name__), str(value).removeprefix("torch.")
            return {"t": f"torch.{kind}", "v": name}
        if isinstance(value, torch.device):
            return {"t": "torch.device", "v": str(value)}
        return None

    def decode_value(self, tag: str, payload: Any) -> Any:
        if tag == "torch.device":
            return torch.device(payload)
        if tag in ("torch.dtype", "torch.layout", "torch.memory_format"):
            value = getattr(torch, str(payload), None)
            if type(value).__name__ != tag.removeprefix("torch."):
                raise ValueError(f"torch {torch.__version__} has no {tag.removeprefix('torch.')} {payload!r}")
            return value
        return None

    def rebuild(self, node: Node, children: Sequence[Any]) -> Any:
        if node.kind == "tuple" and node.name == "torch.Size":
            return torch.Size(children)
        if node.kind == "torch.sparse_coo":
            indices, values, size, coalesced = children
            return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=True)
        layout = _LAYOUTS.get(node.kind)
        if layout is not None:
            compressed, plain, values, size = children
            return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)
        return None

    def allocate(self, spec: LeafSpec, device: Any) -> Destination:
        return place.allocate(spec, device)

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        if not isinstance(target, torch.Tensor) or target.layout in _SPARSE:
            return None
        return place.destination(target, stored)


def _sparse(value: torch.Tensor) -> Branch:
    kind, keys = _SPARSE[value.layout]
    tensor = value.detach()
    if kind == "torch.sparse_coo":
        children: tuple[Any, ...] = (tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced())
    else:
        children = (*(getattr(tensor, key)() for key in keys[:3]), tensor.shape)
    return Branch(Node(kind, None, keys, ()), children, load=lambda restored: tensor.copy_(restored))


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether the tensors of `module.state_dict()` are all of its state, so that filling them restores it."""
    own = torch.nn.Module
    methods = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict", "get_extra_state")
    hooks = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return all(
        all(getattr(type(m), name) is getattr(own, name) for name in methods)
        and not any(getattr(m, h, None) for h in hooks)
        for m in module.modules()
    )
