"""Arrays on an accelerator, also ones that are given away while a save copies them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tierkeep_jax
from tierkeep.errors import ChangedLeafError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="no accelerator that jax knows"),
]


def test_arrays_on_the_device_come_back_onto_it(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(3 << 20, dtype=jnp.float32), "h": jnp.ones((3, 5), jnp.bfloat16), "key": jax.random.key(7)}
    with tierkeep_jax.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree)
        found = checkpointer.restore(1, tree)
    assert found["w"].sharding == tree["w"].sharding
    assert np.array_equal(np.asarray(found["w"]), np.asarray(tree["w"]))
    assert np.array_equal(np.asarray(found["h"]), np.asarray(tree["h"]))
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(tree["key"]))


@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_a_donated_array_is_saved_as_it_was_or_named(snapshot: str, tmp_path: Path) -> None:
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    live = jnp.ones(8 << 20, jnp.float32)
    told = 0
    with tierkeep_jax.Checkpointer(tmp_path) as checkpointer:
        for step in range(10):
            handle = checkpointer.save(step, {"w": live}, snapshot=snapshot)  # type: ignore[arg-type]
            live = double(live)
            with contextlib.suppress(ChangedLeafError):
                handle.result()
            if handle.error is not None:
                assert snapshot == "deferred"
                assert "'w'" in str(handle.error)
                told += 1
        steps = checkpointer.steps()
        assert len(steps) == 10 - told
        for step in steps:
            assert np.all(np.asarray(checkpointer.restore(step)["w"]) == 2.0**step)
