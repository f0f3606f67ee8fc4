"""Two processes of jax.distributed save and restore together; whoever fails, all are told."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import tierkeep_jax
from tests.jax import trees
from tests.orbax import states
from tests.orbax.two_processes import whole
from tierkeep_jax.orbax import Restore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiprocess

DEADLINE_S = 150


def run(root: Path, *task: str) -> list[str]:
    """What each of the processes printed; all of them ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = states.environment(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-m", "tests.orbax.two_processes", address, "2"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(root), *task], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        output = [process.communicate(timeout=DEADLINE_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n=====\n".join(output)
    return output


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("processes") / "root"
    run(found, "save")
    return found


def test_what_two_processes_saved_two_processes_restore_with_ours_and_with_stock(root: Path) -> None:
    run(root, "restore")


# multihost-array-to-numpy
def test_one_process_restores_it_whole_and_onto_its_own_devices(root: Path) -> None:
    item = root / "3" / "state"
    found = tierkeep_jax.load(item)
    for name, data in whole().items():
        np.testing.assert_array_equal(np.asarray(found[name]), data)
    np.testing.assert_array_equal(np.asarray(found["again"]), whole()["rows"])
    grid = trees.mesh(8)
    with ocp.CheckpointManager(root) as manager:
        struct: Any = jax.ShapeDtypeStruct
        wanted = {
            "rows": struct(
                (8, 6), np.float32, sharding=jax.sharding.NamedSharding(grid, jax.sharding.PartitionSpec("x"))
            )
        }
        args = ocp.args.Composite(state=Restore(wanted, partial_restore=True))
        rows = manager.restore(3, args=args).state["rows"]
        trees.assert_same(rows, jax.device_put(whole()["rows"], rows.sharding))
        assert rows.sharding.mesh == grid


def test_each_process_wrote_its_own_shards_and_none_twice(root: Path) -> None:
    item = root / "3" / "state"
    assert tierkeep_jax.verify(item).nbytes
    parts = [item / f"ocdbt.process_{rank}" for rank in range(2)]
    sizes = [max(file.stat().st_size for file in (part / "d").iterdir()) for part in parts]
    assert all(sizes)


@pytest.mark.parametrize("where", ["write", "state"])
@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_process_fails_both_are_told_and_the_next_save_is_well(rank: int, where: str, tmp_path: Path) -> None:
    output = run(tmp_path / "root", "fail", str(rank), where)
    told = [line for text in output for line in text.splitlines() if line.startswith("told: ")]
    own = "No space left" if where == "write" else "'odd'"
    assert len(told) == 2
    assert all(own in line for line in told), told
    assert f"process {rank}" in told[1 - rank]


@pytest.mark.skipif(states.OLD, reason="the next API of this Orbax is another one")
def test_two_processes_save_and_load_through_the_next_api_and_both_are_told_of_a_failure(tmp_path: Path) -> None:
    output = run(tmp_path / "root", "v1")
    told = [line for text in output for line in text.splitlines() if line.startswith("told: ")]
    assert len(told) == 2
    assert all("No space left" in line for line in told), told
