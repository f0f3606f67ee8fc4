"""A handler for Orbax's CheckpointManager: its steps, its layout, its calls, with tierkeep's engine under them.

What it leaves is a checkpoint that stock Orbax restores where tierkeep is not installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import orbax.checkpoint as ocp

from tierkeep.engine import Engine
from tierkeep.options import RestoreOptions
from tierkeep.step import resolve

from . import orbax_state
from .orbax_items import Item, Items

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import jax

    from tierkeep.options import MemoryOptions, SaveOptions

__all__ = ["Handler", "Restore", "Save"]

_STANDARD = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):  # type: ignore[misc]  # Orbax ships no types
    """What `Handler` saves: `item`, any pytree. `save_args` and `custom_metadata` are as in Orbax's StandardSave.

    Of `save_args`, `dtype` is honoured; what they say of chunks is not asked.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None
    snapshot: Literal["auto", "copy", "deferred"] = "auto"
    """`copy`: the call returns when the state is copied. `deferred`: before that; an array of jax that is donated
    meanwhile is reported, and arrays of numpy must stay as they are until the save is done. `auto`: before it where
    nothing can change what is saved, which is so for jax arrays in host memory (a donation meanwhile costs jax a copy),
    and when it is copied elsewhere."""


@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What `Handler` restores: `item`, or without it what was saved. Leaves of `item` are as in Orbax's StandardRestore.

    A leaf `...` is not read. Without a sharding in the target an array comes back on the one it was saved on.
    """

    item: Any = None
    strict: bool = True
    """False: arrays of another shape are cut or padded, as Orbax does it, by Orbax."""
    support_layout: bool = False
    """True: device layouts in `item` are honoured, by Orbax."""
    fallback_sharding: jax.sharding.Sharding | None = None
    """For arrays that were saved on devices that are not there."""
    partial_restore: bool = False
    """True: what `item` lacks is left out; otherwise it is an error."""
    dtype: Literal["cast", "error"] = "cast"
    """An array of another dtype than the target's: converted, as Orbax does it, or an error."""


class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Saves and restores pytrees for Orbax's checkpointers and its CheckpointManager.

    Guarantees: `async_save` returns when the state may be changed (see `Save.snapshot`) and raises nothing: what fails is
    raised by the future that it returns, in every process that saves together. An item is whole and durable before Orbax
    makes it visible; the renames by which it does so are durable after the next save or `close`. `close` leaves no
    process, thread or memory; it may be called twice, and the handler used again.

    With `stock_name` the step names Orbax's StandardCheckpointHandler as the item's, so that `restore(step)` without
    arguments does where tierkeep is not installed. `timeout_s` is how long a process waits for the others of its save.
    """

    def __init__(
        self,
        *,
        options: SaveOptions | None = None,
        memory: MemoryOptions | None = None,
        restore_options: RestoreOptions | None = None,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        stock_name: bool = True,
        timeout_s: float = 1200.0,
    ) -> None:
        self._restore_options = restore_options or RestoreOptions()
        self._processes = multiprocessing_options or ocp.options.MultiprocessingOptions()
        self._items = Items(options, memory, timeout_s)
        self._engine = Engine(orbax_state.OrbaxAdapter())
        self._stock = ocp.StandardCheckpointHandler()
        if stock_name:
            # Of the instance: the class is registered under its own name.
            self.__dict__["typestr"] = lambda: _STANDARD

    # Saving

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Save | None = None
    ) -> list[Any]:
        """Copies the state. The future that is returned ends when it is durable below `directory`."""
        args = args or Save(item, save_args)
        # An error in here would keep Orbax's own threads, and so the process, waiting for 300 s.
        try:
            begun = self._items.begin(directory, self._processes)
            self._items.stage(begun, args.item, args.save_args, args.custom_metadata, args.snapshot)
            return [_Future(begun)]
        except Exception as error:  # noqa: BLE001
            return [_Failed(error)]

    def save(self, directory: Any, item: Any = None, save_args: Any = None, args: Save | None = None) -> None:
        """Returns when the parts of all processes are durable below `directory`, which stands."""
        args = args or Save(item, save_args)
        begun = self._items.begin(directory, self._processes)
        self._items.save(begun, args.item, args.save_args, args.custom_metadata)

    def finalize(self, directory: Any) -> None:
        """By the primary process, when all have saved: the item is whole and durable, but for its name."""
        self._items.commit(directory)

    def prepare(self, item: Any) -> None:
        """Makes the memory for saves of states like `item`, in the background. Raises as a save of it would."""
        self._items.prepare(item, self._processes)

    def close(self) -> None:
        """Ends what is under way and lets go of the memory. Raises a failure that nobody was told of."""
        try:
            self._items.close()
        finally:
            self._engine.close()

    # Restoring

    def restore(self, directory: Any, item: Any = None, args: Restore | None = None) -> Any:
        """What was saved in `directory`, by tierkeep or by stock Orbax; every byte that tierkeep wrote is verified."""
        args = args or Restore(item)
        if not args.strict or args.support_layout:
            stock = ocp.args.StandardRestore(
                args.item,
                strict=args.strict,
                support_layout=args.support_layout,
                fallback_sharding=args.fallback_sharding,
            )
            return self._stock.restore(directory, args=stock)
        options = dataclasses.replace(
            self._restore_options,
            dtype=args.dtype,
            unexpected="ignore" if args.partial_restore else self._restore_options.unexpected,
        )
        return orbax_state.restore(
            self._engine, resolve(directory), args.item, options=options, fallback=args.fallback_sharding
        )

    def metadata(self, directory: Any) -> Any:
        """Orbax's own description of what was saved in `directory`."""
        return self._stock.metadata(directory)


ocp.args.register_with_handler(Handler, for_save=True)(Save)
ocp.args.register_with_handler(Handler, for_restore=True)(Restore)


class _Future:
    """Of an item that is staged. Orbax runs it in a thread of its own, once the directory stands."""

    def __init__(self, item: Item) -> None:
        self._item = item
        self._coroutine: Coroutine[Any, Any, None] = self._run()
        item.is_lost, item.let_go = self._is_lost, self._let_go
        try:
            self._future: Any = ocp.future.CommitFutureAwaitingContractedSignals(self._coroutine, name="tierkeep_save")
        except BaseException as error:
            item.fail(error)
            self._let_go()
            raise

    def result(self, timeout: float | None = None) -> None:
        self._future.result(timeout=timeout)

    def cancel(self) -> None:
        self._item.cancel()
        self._future.cancel()

    async def _run(self) -> None:
        self._item.run()

    def _is_lost(self) -> bool:
        try:
            self._future.result(timeout=0)
        except TimeoutError:
            return False
        except BaseException:  # noqa: BLE001  whatever it is that kept it from being run
            return True
        return False

    def _let_go(self) -> None:
        with contextlib.suppress(ValueError):  # it is about to begin, and sees that it need not
            self._coroutine.close()


class _Failed:
    """Of an item that could not be staged."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> None:
        raise self._error

    def cancel(self) -> None:
        """It has ended."""
