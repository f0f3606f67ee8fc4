"""What several processes saved together with stock Orbax is read by one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import bits, flat, mesh, on, shape
from tests.strangers.two_processes import ITEMS, whole

pytestmark = pytest.mark.multiprocess

DEADLINE_S = 120


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("processes") / "root"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "tests.strangers.two_processes", address, "2"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(root)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        output = [process.communicate(timeout=DEADLINE_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    return root / "3"


@pytest.mark.parametrize("item", ITEMS)
def test_both_adapters_read_what_two_processes_saved(item: str, step: Path) -> None:
    expected = flat(whole(item))
    assert flat(tierkeep_jax.load(step / item)) == expected
    assert flat(tierkeep_torch.load(step / item)) == expected
    into = {name: torch.zeros_like(torch.from_numpy(data)) for name, data in whole(item).items()}
    tierkeep_torch.load(step / item, into)
    assert flat(into) == expected


@pytest.mark.parametrize("item", ITEMS)
def test_it_is_restored_onto_the_devices_of_one_process(item: str, step: Path) -> None:
    state = whole(item)
    target = {
        "rows": shape((8, 6), np.float32, on(mesh(4, 2), "x", "y")),
        "both": shape((4, 10), np.int32, on(mesh(2, 4), "y", "x")),
        "copies": shape((7,), np.float16, on(mesh(7), "x")),
    }
    found = tierkeep_jax.load(step / item, target)
    assert flat(found) == flat(state)
    for name, array in found.items():
        assert isinstance(array, jax.Array)
        assert array.sharding == target[name].sharding
        for part in array.addressable_shards:
            assert bits(part.data) == bits(state[name][part.index])
