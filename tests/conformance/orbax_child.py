"""A child process that runs tests of Orbax, with the stock handlers or with ours in their place.

Where ours take their place:

- `StandardCheckpointHandlerTestBase` and `StandardCheckpointHandlerTestJaxRandomKeys` are subclassed: `handler`,
  `save_args_cls` and `restore_args_cls` are `Handler`, `Save` and `Restore`.
- Elsewhere in v0, `StandIn` handlers are registered for `PyTreeSave`, `PyTreeRestore`, `StandardSave` and
  `StandardRestore`: `Handler`, with the stock arguments translated. Tests that make a stock handler themselves with
  options of its own keep it.
- In v1, `tierkeep_jax.orbax_v1.CheckpointableHandler` owns the name "state" and pytrees in the global registry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conformance.events import Job

__all__: list[str] = []

DEVICES = 8
STANDARD_TESTS = ("StandardCheckpointHandlerTestBase", "StandardCheckpointHandlerTestJaxRandomKeys")


def main() -> None:
    from tests.conformance import events

    task = events.job()
    _start_jax(task)
    _open_packages(task.tests)
    if task.implementation == "ours":
        _put_ours_in_place(task)
    module = importlib.import_module(f"orbax.checkpoint.{task.file}")
    if task.implementation == "ours":
        _put_ours_into(module)
    events.run(task, _chosen(module, task.classes))


def _start_jax(task: Job) -> None:
    """One job of `task.processes` processes with 8 devices together, also where it is one process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // task.processes}"
    os.environ["TEST_TMPDIR"] = str(task.scratch / "tests")
    from absl import flags

    flags.FLAGS.mark_as_parsed()

    import jax

    jax.distributed.initialize(
        coordinator_address=f"localhost:{task.port}", num_processes=task.processes, process_id=task.rank
    )


def _open_packages(tests: Path) -> None:
    """Lets orbax.checkpoint import the fetched modules that the wheel lacks; what the wheel has comes first."""
    for folder in sorted({path.parent for path in tests.rglob("*.py")}):
        package = importlib.import_module(".".join(["orbax.checkpoint", *folder.relative_to(tests).parts]))
        package.__path__.append(str(folder))
    # What files import that few tests use, or none: large, or one more package to install.
    for names in (("grain", "grain.python"), ("portpicker",)):
        if importlib.util.find_spec(names[0]) is None:
            sys.modules |= {name: types.ModuleType(name) for name in names}


def _chosen(module: types.ModuleType, classes: list[str]) -> types.ModuleType:
    """A module that defines just these classes. A nested one is a base: it becomes a case of its own here."""
    held = types.ModuleType(module.__name__)
    for dotted in classes:
        value: Any = module
        for part in dotted.split("."):
            value = getattr(value, part)
        name = dotted.replace(".", "_")
        setattr(held, name, type(name, (value,), {"__module__": held.__name__}) if "." in dotted else value)
    return held


def _put_ours_in_place(task: Job) -> None:
    """Before the tests are imported: they take some names from these modules at import."""
    if task.file.startswith("experimental.v1."):
        _own_state_in_v1()
    elif task.file != "_src.handlers.standard_checkpoint_handler_test":
        _register_stand_ins()


def _put_ours_into(module: types.ModuleType) -> None:
    for name in STANDARD_TESTS:
        if hasattr(module, name):
            setattr(module, name, _with_our_handler(getattr(module, name)))
    if not module.__name__.startswith("orbax.checkpoint.experimental"):
        _replace_handlers(module)


def _with_our_handler(case: Any) -> Any:
    from orbax.checkpoint import test_utils
    from orbax.checkpoint._src.multihost import multihost

    ours = importlib.import_module("tierkeep_jax.orbax")

    class Finalizing(ours.Handler):  # type: ignore[misc, name-defined]
        """As the stock handler of these tests: a save is finalized by the handler's own caller."""

        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save(directory, *args, **kwargs)
            test_utils.sync_global_processes("Handler:save")
            if multihost.process_index() == 0:
                self.finalize(directory)
            test_utils.sync_global_processes("Handler:finalize")

    handler = property(lambda self: Finalizing())
    names = {"handler": handler, "save_args_cls": ours.Save, "restore_args_cls": ours.Restore}
    return type(case.__name__, (case,), names | {"__module__": case.__module__})


def _register_stand_ins() -> None:
    """Handlers for the stock pytree and standard arguments that save and restore with ours."""
    from orbax.checkpoint import checkpoint_args
    from orbax.checkpoint._src.handlers import pytree_checkpoint_handler, standard_checkpoint_handler

    ours = importlib.import_module("tierkeep_jax.orbax")

    class StandIn(ours.Handler):  # type: ignore[misc, name-defined]
        async def async_save(self, directory: Any, args: Any) -> Any:
            return await super().async_save(directory, args=_translated(args, ours.Save))

        def save(self, directory: Any, *_: Any, args: Any) -> None:
            super().save(directory, args=_translated(args, ours.Save))

        def restore(self, directory: Any, *_: Any, args: Any = None) -> Any:
            if args is None:
                return super().restore(directory)
            target = _target(args, lambda: self.metadata(directory))
            given = {"item": target, "restore_args": None} if target is not None else {}
            return super().restore(directory, args=_translated(dataclasses.replace(args, **given), ours.Restore))

    class PyTreeStandIn(StandIn):
        pass

    class StandardStandIn(StandIn):
        pass

    for stand_in, stock in ((PyTreeStandIn, pytree_checkpoint_handler), (StandardStandIn, standard_checkpoint_handler)):
        prefix = "PyTree" if stock is pytree_checkpoint_handler else "Standard"
        for use in ("Save", "Restore"):
            register = checkpoint_args.register_with_handler(stand_in, **{f"for_{use.lower()}": True})
            register(getattr(stock, f"{prefix}{use}Args"))
    _keep_arguments_of_stock()


def _keep_arguments_of_stock() -> None:
    """The stock handlers go on taking their arguments: a step that names one is restored with it, and some tests make one."""
    from orbax.checkpoint import checkpoint_args
    from orbax.checkpoint._src.handlers import pytree_checkpoint_handler as pytree
    from orbax.checkpoint._src.handlers import standard_checkpoint_handler as standard

    of_stock: dict[Any, Any] = {
        pytree.PyTreeCheckpointHandler: (pytree.PyTreeSaveArgs, pytree.PyTreeRestoreArgs),
        standard.StandardCheckpointHandler: (standard.StandardSaveArgs, standard.StandardRestoreArgs),
    }
    registered = checkpoint_args.get_registered_args_cls

    def get_registered_args_cls(handler: Any) -> Any:
        kind = handler if inspect.isclass(handler) else type(handler)
        return of_stock.get(kind) or registered(handler)

    checkpoint_args.get_registered_args_cls = get_registered_args_cls


def _replace_handlers(module: types.ModuleType) -> None:
    """Where the tests make a stock handler with no option, or with options that `Handler` takes, they get a stand-in."""
    from orbax.checkpoint import checkpoint_args
    from orbax.checkpoint._src.handlers import pytree_checkpoint_handler, standard_checkpoint_handler

    options = inspect.signature(importlib.import_module("tierkeep_jax.orbax").Handler).parameters
    utilities = sys.modules.get("orbax.checkpoint._src.checkpointers.checkpointer_test_utils")
    for prefix, home in (("PyTree", pytree_checkpoint_handler), ("Standard", standard_checkpoint_handler)):
        name = f"{prefix}CheckpointHandler"
        stock = getattr(home, name)
        stand_in = checkpoint_args.get_registered_handler_cls(getattr(home, f"{prefix}SaveArgs"))
        if stand_in is stock:
            continue
        for holder in (module, utilities):
            if holder is not None and getattr(holder, name, None) is stock:
                setattr(holder, name, _made_as(stock, stand_in, options))


def _made_as(stock: Any, stand_in: Any, options: Any) -> Any:
    class Made(stock):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return stock(*args, **kwargs) if args or kwargs.keys() - options.keys() else stand_in(**kwargs)

    return Made


def _translated(args: Any, wanted: Any) -> Any:
    """The same arguments as ours. One that is not at its default and that ours lack is an error."""
    names = {field.name for field in dataclasses.fields(wanted)}
    given = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name in names:
            given[field.name] = value
        elif value is not default and value != default:
            raise NotImplementedError(f"{wanted.__name__} has no {field.name}")
    return wanted(**given)


def _target(args: Any, metadata: Callable[[], Any]) -> Any:
    """A target that says what PyTreeRestore says by its structure and by `restore_args`; None where it says nothing.

    Its leaves are placeholders, or of the kind, shape and sharding that are asked for or else were stored.
    """
    import jax

    restore_args = getattr(args, "restore_args", None)
    if not hasattr(args, "restore_args") or (args.item is None and restore_args is None):
        return None
    stored = metadata()
    flat_stored = _flat(getattr(stored, "tree", stored))
    wanted = {} if restore_args is None else _flat(restore_args)
    leaves, structure = jax.tree_util.tree_flatten_with_path(restore_args if args.item is None else args.item)
    found = []
    for path, given in leaves:
        key = _path(path)
        # What is not stored stays as it is: what comes of it is for the handler to say.
        known = given is not ... and key in flat_stored
        found.append(_target_leaf(wanted.get(key), flat_stored[key]) if known else given)
    return jax.tree_util.tree_unflatten(structure, found)


def _target_leaf(wanted: Any, stored: Any) -> Any:
    import jax
    import numpy as np
    from orbax.checkpoint._src.metadata import value as value_metadata

    dtype = getattr(wanted, "dtype", None) or stored.dtype
    if isinstance(stored, value_metadata.StringMetadata):
        return ""
    if isinstance(stored, value_metadata.ScalarMetadata):
        return np.dtype(dtype).type(0).item()
    sharding = getattr(wanted, "sharding", None)
    if sharding is None and getattr(wanted, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(wanted.mesh, wanted.mesh_axes)
    if sharding is None and wanted is None and stored.sharding is not None:
        sharding = stored.sharding.to_jax_sharding()
    struct: Any = jax.ShapeDtypeStruct
    return struct(getattr(wanted, "global_shape", None) or stored.shape, dtype, sharding=sharding)


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    import jax

    return {_path(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _path(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _own_state_in_v1() -> None:
    """Our handler is the last one for pytrees, which is the one that v1 takes, and owns the name "state"."""
    v1 = importlib.import_module("orbax.checkpoint.experimental.v1")
    registration = importlib.import_module("orbax.checkpoint.experimental.v1._src.handlers.registration")
    global_registration = importlib.import_module("orbax.checkpoint.experimental.v1._src.handlers.global_registration")
    ours = importlib.import_module("tierkeep_jax.orbax_v1").CheckpointableHandler
    registry = registration.global_registry()
    stock = v1.handlers.PyTreeHandler
    typestrs = registry.get_secondary_typestrs(stock)
    kept = [entry for entry in registry.get_all_entries() if entry[0] is not stock]
    registry.get_all_entries()[:] = kept
    registry.add(ours, secondary_typestrs=typestrs)
    registry.add(ours, checkpointable_name=global_registration.STATE_CHECKPOINTABLE_KEY)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
