"""A child process that runs tests of torch.distributed.checkpoint, with the stock storage or with ours in its place.

Where ours take their place, in every torch module that holds the stock class under its name, and so in the tests:

- `FileSystemWriter` and `FileSystemReader` are subclasses of `tierkeep_torch.dcp.StorageWriter` and `StorageReader`
  that take the stock arguments;
- `DefaultStager` is a subclass of `tierkeep_torch.dcp.AsyncStager`, likewise.

Without an accelerator the tests that ask for some are run on the CPU with gloo: see `_run_on_cpu`.

The ranks of a test are forked from this process where the tests would spawn them, each of which imports torch first; no
accelerator has been touched yet. Processes that are spawned all the same import this module too, and have everything in
place before the tests are unpickled.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.events import Job

__all__: list[str] = []

# The order matters only in that all are imported before a name in them is replaced.
HOLDERS = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint._storage_utils",
    "torch.distributed.checkpoint.format_utils",
)
_ACCELERATORS = 4  # that tests are told of where there is none
# They derive from the stock classes, which they shall go on doing.
DERIVED = ("torch.distributed.checkpoint._fsspec_filesystem", "torch.distributed.checkpoint.hf_storage")


def main() -> None:
    from tests.conformance import events

    task = events.job()
    # A test of compatibility names this folder outright, and would find there what another implementation left.
    shutil.rmtree("/tmp/dcp_testing", ignore_errors=True)
    events.run(task, importlib.import_module(_module_name(task)))


def prepare() -> None:
    """In this process and in each one that it spawns."""
    from tests.conformance import events

    task = events.job()
    sys.path.insert(0, str((task.tests / task.file).parent))
    # A rank that waits for one that has failed gives up before the runner gives up on both.
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = "240"
    import torch

    # The machine's cores are shared by several ranks.
    torch.set_num_threads(1)
    common: Any = importlib.import_module("torch.testing._internal.distributed._tensor.common_dtensor")
    if not hasattr(common, "_get_device_type"):
        # Of a later torch than this one, for tests that are of a later one.
        common._get_device_type = lambda world_size: "cpu"
    if not torch.accelerator.is_available():
        _run_on_cpu(torch, common)
        _fork_ranks()
    if task.implementation == "ours":
        _put_ours_in_place()


def _module_name(task: Job) -> str:
    return task.file.rpartition("/")[2].removesuffix(".py")


def _run_on_cpu(torch: Any, common_dtensor: Any) -> None:
    """Tests that ask for accelerators get the CPU: to move there is to stay, and gloo takes the place of nccl.

    What asks for nccl alone is skipped, as upstream skips it.
    """
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")

    def run_always(_: int, *, allow_cpu: bool = True) -> Callable[[Any], Any]:
        return lambda test: test

    for holder in (common, common_dtensor):
        holder.skip_if_lt_x_gpu = run_always

    base = common_dtensor.DTensorTestBase
    stock = base.init_pg

    @functools.wraps(stock)
    def init_pg(self: Any, eager_init: bool, backend: str | None = None) -> Any:
        wanted = backend or self.backend
        return stock(self, eager_init, "gloo" if "gloo" in wanted else wanted)

    base.init_pg = init_pg

    fsdp = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    made = fsdp.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # FSDP takes the CPU only from who names it.
        made(self, *args, **{"device_id": torch.device("cpu")} | kwargs)

    fsdp.__init__ = init
    # A world of as many ranks as there are accelerators would be one without ranks, and its test one that cannot fail.
    torch.cuda.device_count = lambda: _ACCELERATORS
    moved = torch.nn.Module.to

    @functools.wraps(moved)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if args and isinstance(args[0], int) else moved(self, *args, **kwargs)

    torch.nn.Module.to = to
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.Tensor.cuda = lambda self, *_, **__: self
    _factories_on_cpu(torch)().__enter__()


def _fork_ranks() -> None:
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")

    def fork_processes(self: Any) -> None:
        self._start_processes(multiprocessing.get_context("fork").Process)

    common.MultiProcessTestCase._spawn_processes = fork_processes


def _factories_on_cpu(torch: Any) -> Any:
    overrides = importlib.import_module("torch.overrides")

    class FactoriesOnCpu(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        """`device="cuda"`, `"cuda:1"` and `1` mean the CPU, and so does `.to(1)`."""

        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if isinstance(device, int) or (device is not None and str(device).startswith("cuda")):
                kwargs["device"] = torch.device("cpu")
            if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
                args = (args[0], torch.device("cpu"), *args[2:])
            return function(*args, **kwargs)

    return FactoriesOnCpu


def _put_ours_in_place() -> None:
    for name in (*DERIVED, *HOLDERS):
        importlib.import_module(name)
    filesystem = sys.modules["torch.distributed.checkpoint.filesystem"]
    staging = sys.modules["torch.distributed.checkpoint.staging"]
    ours = importlib.import_module("tierkeep_torch.dcp")
    module = sys.modules[__name__]
    for name, stock, base in (
        ("FileSystemWriter", filesystem.FileSystemWriter, ours.StorageWriter),
        ("FileSystemReader", filesystem.FileSystemReader, ours.StorageReader),
        ("DefaultStager", staging.DefaultStager, ours.AsyncStager),
    ):
        replacement = _with_stock_arguments(name, stock, base)
        # Where pickle looks for it: a writer travels to the process that writes.
        setattr(module, name, replacement)
        for holder in HOLDERS:
            if getattr(sys.modules[holder], name, None) is stock:
                setattr(sys.modules[holder], name, replacement)


def _with_stock_arguments(name: str, stock: Any, base: Any) -> Any:
    """`base`, made with the arguments of `stock`: those that `base` names are passed on.

    One that `base` does not name and that is not at its default is an error, unless it only says how fast.
    """
    signature = inspect.signature(stock)
    taken = inspect.signature(base).parameters
    # What ours name otherwise.
    names = {"config": "options"} if name == "DefaultStager" else {}

    class Replacement(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            unknown = {
                key
                for key, value in given.items()
                if names.get(key, key) not in taken
                and key not in _HOW_FAST
                and value != signature.parameters[key].default
            }
            if unknown:
                raise NotImplementedError(f"{base.__name__} has no {', '.join(sorted(unknown))}")
            renamed = {names.get(key, key): value for key, value in given.items()}
            super().__init__(**{key: value for key, value in renamed.items() if key in taken})

    Replacement.__name__ = Replacement.__qualname__ = name
    Replacement.__module__ = __name__
    return Replacement


_HOW_FAST = {
    "single_file_per_rank",
    "sync_files",
    "thread_count",
    "per_thread_copy_ahead",
    "cache_staged_state_dict",
    "config",
}


prepare()
if __name__ == "__main__":
    main()
