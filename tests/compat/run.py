"""Exchanges checkpoints with the oldest and the newest Orbax and TensorStore that pyproject.toml admits.

    python -m tests.compat.run [FOLDER]

Makes an environment for each (in FOLDER, where they are found again the next time, or in a folder that is removed),
writes checkpoints with this tierkeep and reads them there, writes checkpoints there and reads them with this tierkeep,
and prints docs/compat.md. Takes minutes and the package index; not run by the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("core", "jax_adapter", "torch_adapter", "")]
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tierkeep_jax
import tierkeep_torch
from tests.compat.stock import flat
from tierkeep.format import dtypes
from tierkeep_jax import place

__all__: list[str] = []

DEADLINE_S = 300
DTYPES = tuple(name for name in dtypes.NAMES if dtypes.lookup(name).zarr == name)


def environment(folder: Path, name: str) -> Path:
    """The interpreter of an environment with the oldest or the newest versions, made if it is not there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["jax"]]
    if name == "oldest":
        wanted = [re.sub(r">=([^,]+).*", r"==\1", one) for one in wanted]
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def stock(python: Path, *arguments: object) -> dict[str, Any]:
    """What stock.py says there."""
    command = [str(python), str(ROOT / "tests" / "compat" / "stock.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def some(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    found = dtypes.numpy_dtype(dtype)
    assert found is not None
    return np.arange(int(np.prod(shape)), dtype="f4").reshape(shape).__mod__(3).astype(found)


def states() -> dict[str, Any]:
    """What is written with torch and with JAX: every dtype that zarr3 has and the framework knows."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tensors = {
        name: torch.from_numpy(some("uint8", 4 * getattr(torch, name).itemsize).copy()).view(getattr(torch, name))
        for name in DTYPES
        if isinstance(getattr(torch, name, None), torch.dtype) and name not in ("bool", "int2", "int4")
    }
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    partition: Any = jax.sharding.PartitionSpec
    spread = jax.device_put(some("float32", 16, 24), jax.sharding.NamedSharding(grid, partition("x", "y")))
    arrays = {name: jnp.asarray(some(name, 2, 3)) for name in DTYPES if place.holds(name)}
    plain: dict[str, Any] = {"step": 12, "rate": 0.5, "none": None, "empty": [{}, (), []]}
    return {
        "torch": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "dtypes": tensors, "plain": plain,
                  "scalar": torch.tensor(-0.0), "view": torch.arange(20.0).reshape(4, 5)[::2, 1:3].t()},
        "jax": {"w": spread, "dtypes": arrays, "key": jax.random.key(1), "host": np.arange(6.0), "plain": plain},
    }  # fmt: skip


def written_by_tierkeep(folder: Path) -> None:
    for framework, state in states().items():
        case = folder / framework
        case.mkdir()
        adapter: Any = {"torch": tierkeep_torch, "jax": tierkeep_jax}[framework]
        with adapter.Checkpointer(case / "root", asynchronous=False) as checkpointer:
            checkpointer.save(3, state)
        seen = jax.tree.map(_seen, state)
        (case / "structure.json").write_text(json.dumps(jax.tree.map(_kind, seen)))
        (case / "expected.json").write_text(json.dumps(dict(flat(seen))))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        return "random key" if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else "jax"
    return "numpy" if isinstance(leaf, np.ndarray) else "value"


def _seen(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(leaf.element_size())
    bits = leaf.contiguous() if width is None else leaf.contiguous().view(width)
    dtype = dtypes.numpy_dtype(str(leaf.dtype).removeprefix("torch."))
    assert dtype is not None
    return bits.numpy().view(dtype)


def read_by_tierkeep(folder: Path, written: dict[str, str]) -> dict[str, str]:
    expected = json.loads((folder / "expected.json").read_text())
    results = {}
    for way, outcome in written.items():
        path = folder / way / "3" if way == "CheckpointManager" else folder / way
        for framework, adapter in (("jax", tierkeep_jax), ("torch", tierkeep_torch)):
            result = outcome
            if outcome == "ok":
                try:
                    loaded: Any = adapter.load(path)
                    found = dict(flat(jax.tree.map(_seen, loaded)))
                    wrong = sorted(name for name in expected if found.get(name) != expected[name])
                    result = "ok" if not wrong else f"differ: {', '.join(wrong)}"
                except Exception as error:  # noqa: BLE001 (whatever comes is the result)
                    result = f"{type(error).__name__}: {error}"[:300]
            results[f"{way} → tierkeep_{framework}"] = result
    return results


def main(folder: Path) -> None:
    versions: dict[str, dict[str, str]] = {}
    reads: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        ours = Path(temporary) / "ours"
        ours.mkdir()
        written_by_tierkeep(ours)
        for name in ("oldest", "newest"):
            python = environment(folder, name)
            for framework in ("torch", "jax"):
                found = stock(python, "read", ours / framework)
                versions[name] = found["versions"]
                for way, result in found["done"].items():
                    reads.setdefault(f"tierkeep_{framework} → {way}", {})[name] = result
            theirs = Path(temporary) / name
            theirs.mkdir()
            written = stock(python, "write", theirs)["done"]
            for way, result in read_by_tierkeep(theirs, written).items():
                reads.setdefault(way, {})[name] = result
    print_table(versions, reads)


def print_table(versions: dict[str, dict[str, str]], reads: dict[str, dict[str, str]]) -> None:
    print("| | oldest | newest |\n|---|---|---|")
    for package in versions["oldest"]:
        print(f"| {package} | {versions['oldest'][package]} | {versions['newest'][package]} |")
    print("\n| written by → read by | oldest | newest |\n|---|---|---|")
    for way, results in reads.items():
        print(f"| {way} | {results['oldest']} | {results['newest']} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
