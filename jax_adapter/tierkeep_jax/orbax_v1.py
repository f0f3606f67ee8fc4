"""A handler for Orbax's next API, `orbax.checkpoint.experimental.v1`: in a context with its registry, pytrees go through it.

    context = ocp.Context()
    context.checkpointables.registry = registry()
    with context:
        ocp.save(path, state)

That API still moves: it was tried with the versions that the extra `orbax-v1` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp
from orbax.checkpoint.experimental.v1._src.context import context as orbax_context
from orbax.checkpoint.experimental.v1._src.handlers import pytree_handler

from tierkeep.engine import Engine
from tierkeep.options import RestoreOptions
from tierkeep.step import resolve

from . import orbax_state
from .orbax_items import Item, Items

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["CheckpointableHandler", "close", "registry"]

_STATE = "state"  # the name by which Orbax saves what is saved alone

_guard = threading.Lock()
_shared: list[Items] = []
"""Orbax makes a handler for every call: what is kept from one save to the next is the process's."""


class CheckpointableHandler:
    """Saves and loads pytrees.

    Guarantees: `save` returns when the state is copied; what it returns ends when the item is whole and durable, in every
    process that saves together, and raises what one of them failed of. Memory for the copies is kept for the next save,
    until `close`, or the end of the process. What is loaded and was saved by tierkeep is verified.
    """

    def __init__(self) -> None:
        self._context = orbax_context.get_context()
        self._stock = pytree_handler.PyTreeHandler(context=self._context)

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        saves = _items()
        item = saves.begin(directory.path, self._context.multiprocessing_options)
        saves.stage(item, checkpointable, self._save_args(checkpointable))
        return _Writing(saves, item, directory)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        return self._load(directory, abstract_checkpointable)

    async def _load(self, directory: Any, abstract: Any) -> Any:
        # What only Orbax knows: types in place of leaves, other protocols of its own, arrays that are cut to a shape.
        if not _is_plain(abstract) or self._context.array_options.loading.enable_padding_and_truncation:
            return await (await self._stock.load(directory, abstract))
        partial = self._context.pytree_options.loading.partial_load
        options = RestoreOptions(dtype="cast", unexpected="ignore" if partial else "error")
        with contextlib.closing(Engine(orbax_state.OrbaxAdapter())) as engine:
            return orbax_state.restore(engine, resolve(directory), abstract, options=options, fallback=None)

    async def metadata(self, directory: Any) -> Any:
        """Orbax's own description of what was saved in `directory`."""
        return await self._stock.metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        return bool(self._stock.is_handleable(checkpointable))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return bool(self._stock.is_abstract_handleable(abstract_checkpointable))

    def _save_args(self, checkpointable: Any) -> Any:
        """The dtypes that the context asks for; None if it asks for none."""
        saving = self._context.array_options.saving
        if saving.storage_options.dtype is None and saving.scoped_storage_options_creator is None:
            return None
        return pytree_handler._get_v0_save_args(checkpointable, saving)


def registry() -> Any:
    """Orbax's handlers as they are registered now, with this one in the place of its own for pytrees."""
    known = ocp.handlers.global_registry()
    found = ocp.handlers.local_registry(include_global_registry=False)
    stock = ocp.handlers.PyTreeHandler
    for handler, name in known.get_all_entries():
        if handler is not stock and name != _STATE:
            others = known.get_secondary_typestrs(handler)
            found.add(handler, checkpointable_name=name, secondary_typestrs=others)
    names = [f"{stock.__module__}.{stock.__qualname__}", *known.get_secondary_typestrs(stock)]
    found.add(CheckpointableHandler, secondary_typestrs=names)
    found.add(CheckpointableHandler, checkpointable_name=_STATE)
    return found


def close() -> None:
    """Ends the saves that are under way and lets go of the memory for copies. Raises a failure that nobody was told of."""
    with _guard:
        shared = list(_shared)
        _shared.clear()
    for saves in shared:
        saves.close()


def _items() -> Items:
    with _guard:
        if not _shared:
            _shared.append(Items())
        return _shared[0]


def _is_plain(abstract: Any) -> bool:
    known = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, str)
    return all(isinstance(leaf, known) or leaf is ... for leaf in jax.tree_util.tree_leaves(abstract))


class _Writing:
    """What is left of a save when the state is copied."""

    def __init__(self, saves: Items, item: Item, directory: Any) -> None:
        self._saves = saves
        self._item = item
        self._directory = directory

    def __await__(self) -> Any:
        return self._write().__await__()

    async def _write(self) -> None:
        try:
            await self._directory.await_creation()
        except BaseException as error:
            self._item.fail(error)
            raise
        try:
            await asyncio.to_thread(self._item.run, commit=True)
            if not self._item.rank:
                await asyncio.to_thread(self._saves.settle, self._item.path)
        except asyncio.CancelledError:
            self._item.cancel()
            raise
