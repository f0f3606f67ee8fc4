"""docs/dtypes.md says of every dtype what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import ml_dtypes
import pytest
import torch

import tierkeep_jax.place
import tierkeep_torch.place
from tests.jax import trees
from tierkeep.format import dtypes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dtypes.md"
ROW = re.compile(r"\| `(\w+)` \| (\d+) \|([^|]*)\|([^|]*)\|([^|]*)\| `(\w+)` \|")
ROWS = {row[0]: row[1:] for row in ROW.findall(PAGE.read_text(encoding="utf-8"))}
WRITTEN_FOR = {"JAX": (jax, "0.10"), "torch": (torch, "2.13"), "ml_dtypes": (ml_dtypes, "0.6")}


def test_the_table_has_every_dtype_once() -> None:
    assert sorted(ROWS) == sorted(dtypes._TABLE)
    assert len(ROW.findall(PAGE.read_text(encoding="utf-8"))) == len(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_is_stored(name: str) -> None:
    nbytes, _, _, _, zarr = ROWS[name]
    assert (int(nbytes), zarr) == (dtypes.lookup(name).itemsize, dtypes.lookup(name).zarr)


@pytest.mark.parametrize(("column", "library"), [pytest.param(1, "ml_dtypes", id="numpy"), (2, "JAX"), (3, "torch")])
def test_a_column_says_what_the_framework_has(column: int, library: str) -> None:
    with trees.enable_x64(True):
        holds = (
            lambda name: dtypes.numpy_dtype(name) is not None,
            tierkeep_jax.place.holds,
            tierkeep_torch.place.holds,
        )[column - 1]
        present = {name for name in ROWS if holds(name)}
    documented = {name for name, row in ROWS.items() if row[column].strip()}
    module, written_for = WRITTEN_FOR[library]
    assert f"{library} {written_for}" in PAGE.read_text(encoding="utf-8")
    older = [int(n) for n in module.__version__.split(".")[:2]] < [int(n) for n in written_for.split(".")]
    assert present <= documented if older else present == documented
