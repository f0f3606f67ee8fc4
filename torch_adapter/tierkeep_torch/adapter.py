"""PyTorch as the core sees it: tensors as leaves, modules and optimizers as the state they give."""

from __future__ import annotations

import base64
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from tierkeep.adapter import Branch, Destination, Stateful
from tierkeep.restore.arrays import allocate_numpy
from tierkeep.tree import Node, Value

from . import place, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from tierkeep.leaf import Leaf, LeafSpec
    from tierkeep.tree import Tree

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
            return _module(value)
        if cls is _ExtraState:
            return Stateful(value.state, value.take, in_place=False)
        if cls is torch.Size:
            return Branch(Node("tuple", "torch.Size", (), ()), tuple(value))
        if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            if not callable(getattr(value, "load_state_dict", None)):
                raise TypeError(f"an object of type {cls.__qualname__} has state_dict() but no load_state_dict()")
            return Stateful(value.state_dict(), value.load_state_dict, in_place=False, check=_fits(value))
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
        if tag == "torch.save":  # an object that DCP's planner made bytes of
            return _unpickled(payload)
        if tag == "torch.save.ranks":
            return [None if each is None else _unpickled(each) for each in payload]
        if tag in ("torch.dtype", "torch.layout", "torch.memory_format"):
            value = getattr(torch, str(payload), None)
            if type(value).__name__ != tag.removeprefix("torch."):
                raise ValueError(f"torch {torch.__version__} has no {tag.removeprefix('torch.')} {payload!r}")
            return value
        return None

    def rebuild(self, node: Node, children: Sequence[Any]) -> Any:
        if node.kind == "tuple" and node.name == "torch.Size":
            return torch.Size(children)
        layout = _LAYOUTS.get(node.kind)
        return None if layout is None else _rebuild_sparse(layout, dict(zip(node.keys, children, strict=True)))

    def allocate(self, spec: LeafSpec, device: Any) -> Destination:
        if not place.holds(spec.dtype):
            # What torch has no dtype for comes back in numpy, where no bit is lost.
            return allocate_numpy(spec._replace(kind="ndarray"))
        return place.allocate(spec, device)

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        if not isinstance(target, torch.Tensor) or target.layout in _SPARSE:
            return None
        return place.destination(target, stored)

    def copies(self) -> Callable[[], AbstractContextManager[object]]:
        return stage.copies()

    def pin(self, memory: np.ndarray[Any, Any]) -> Callable[[], object] | None:
        return stage.pin(memory)


def _unpickled(payload: str) -> Any:
    """What `torch.save` made, if it is of the kinds that torch calls safe. Raises ValueError saying which is not."""
    try:
        return torch.load(io.BytesIO(base64.b64decode(payload)), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"an object that only torch.distributed.checkpoint.load restores, with tierkeep_torch.dcp.StorageReader: {error}"
        ) from error


def _fits(value: Any) -> Callable[[Tree], str | None] | None:
    """Asks what an optimizer's own `load_state_dict` asks, which would only do so after everything was read."""
    own = torch.optim.Optimizer
    if not isinstance(value, own) or type(value).load_state_dict is not own.load_state_dict:
        return None
    if value._optimizer_load_state_dict_pre_hooks:
        return None  # they may make another state of it
    optimizer = value

    def check(tree: Tree) -> str | None:
        wanted = [len(group["params"]) for group in optimizer.param_groups]
        groups = _child(tree, "param_groups")
        saved = [_child(group, "params") for group in groups.children] if isinstance(groups, Node) else []
        sizes = [len(params.children) if isinstance(params, Node) else None for params in saved]
        if sizes == wanted:
            return None
        return f"parameter groups of {sizes} parameters in the checkpoint, of {wanted} in the target's optimizer"

    return check


def _child(tree: Tree, key: str) -> Tree:
    if not isinstance(tree, Node) or key not in tree.keys:
        return None
    return tree.children[tree.keys.index(key)]


def _sparse(value: torch.Tensor) -> Branch:
    """Its parts. The node's name is the size, so that it can be compared before anything is read."""
    stage.check_class(value)
    kind, parts = _SPARSE[value.layout]
    keys: tuple[str, ...] = parts
    tensor = value.detach()
    if kind == "torch.sparse_coo":
        children: tuple[Any, ...] = (tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced())
    else:
        children = (*(getattr(tensor, key)() for key in keys[:3]), tensor.shape)
    mark = stage.mark(value)
    if mark is not None:
        keys, children = (*keys, "mark"), (*children, mark)

    def load(restored: torch.Tensor) -> None:
        with torch.no_grad():
            if value.layout is not torch.sparse_coo:  # copy_ takes the number of elements as it is
                value.resize_as_sparse_(restored)
            value.copy_(restored)

    return Branch(Node(kind, str(tuple(tensor.shape)), keys, ()), children, load=load)


def _rebuild_sparse(layout: torch.layout, parts: dict[Any, Any]) -> torch.Tensor:
    values, size = parts["values"], parts["size"]
    if layout is torch.sparse_coo:
        made = torch.sparse_coo_tensor(
            parts["indices"], values, size, is_coalesced=parts["coalesced"], check_invariants=True
        )
    else:
        first, second = (parts[key] for key in _SPARSE[layout][1][:2])
        made = torch.sparse_compressed_tensor(first, second, values, size, layout=layout, check_invariants=True)
    return place.marked(made, parts.get("mark"))


class _ExtraState:
    """What a module's `get_extra_state` gave: restored as it was saved, whatever the module holds now."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def take(self, state: Any) -> None:
        self.state = state


def _module(module: torch.nn.Module) -> Stateful:
    state = module.state_dict()
    if _is_plain(module):
        return Stateful(state, None, in_place=True)
    for key in state:
        if key.rpartition(".")[2] == "_extra_state":
            state[key] = _ExtraState(state[key])

    def load(restored: dict[str, Any]) -> None:
        for key, value in restored.items():
            if type(value) is _ExtraState:
                restored[key] = value.state
        module.load_state_dict(restored)

    return Stateful(state, load, in_place=True)


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
