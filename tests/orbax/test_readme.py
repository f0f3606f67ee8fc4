"""What the README says of coming from Orbax: a diff of few lines, before and after which the same loop runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.jax import trees

README = Path(__file__).parents[2] / "README.md"
MOST_LINES = 5


def _diff() -> list[str]:
    section = README.read_text().split("\n## Coming from Orbax\n", 1)[1]
    found = re.search(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def _run(lines: list[str], root: Path) -> Any:
    state = {"w": jax.numpy.arange(6.0), "n": np.arange(3), "step": 7}
    namespace: dict[str, Any] = {"root": root, "step": 7, "state": state, "target": trees.specs(state)}
    exec("\n".join(lines), namespace)  # noqa: S102  our own page
    return state, namespace["state"]


def test_the_change_is_of_few_lines_and_before_and_after_it_the_loop_gives_back_what_it_saved(tmp_path: Path) -> None:
    diff = _diff()
    assert len([line for line in diff if line.startswith(("+", "-"))]) <= MOST_LINES
    before = [line[1:] for line in diff if not line.startswith("+")]
    after = [line[1:] for line in diff if not line.startswith("-")]
    for name, lines in (("before", before), ("after", after)):
        saved, found = _run(lines, tmp_path / name)
        assert found is not saved
        jax.tree.map(trees.assert_same, found, saved)
    assert not (tmp_path / "before" / "7" / "default" / "tierkeep.json").exists()
    assert (tmp_path / "after" / "7" / "default" / "tierkeep.json").exists()
    restoring = [line for line in before if "manager.save(" not in line]
    saved, found = _run(restoring, tmp_path / "after")
    jax.tree.map(trees.assert_same, found, saved)
