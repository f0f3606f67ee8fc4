"""The bench measures every contender, says what it found in one shape, and leaves nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.contender import Contender
from bench.report import Report, Row
from bench.rounds import enter, measure
from bench.save import better_dcp
from bench.workplace import NotEnoughSpaceError, workplace

ROOT = Path(__file__).parent.parent
RIVALS = {
    "save": {"torch.save", "torch.save-nocrc", "dcp", "safetensors", "orbax", "orbax-raw"},
    "restore": {"torch.load", "dcp", "safetensors", "orbax", "orbax-raw"},
}
OURS = {"save": {"ours", "ours-first"}, "restore": {"ours", "ours-new"}}
LIMITS = {"save": {"limit"}, "restore": {"limit", "limit-new"}}


def _bench(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bench", *map(str, arguments)]


def _named(name: str) -> Contender:
    contender = Contender()
    contender.name = name
    return contender


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("question", ["save", "restore"])
def test_a_measurement_has_every_row_in_the_one_shape_and_leaves_nothing_behind(question: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    answer_path = tmp_path / "answer.json"
    options: list[str | Path] = ["--gb", "0.002", "--rounds", "1", "--dir", work, "--json", answer_path]
    done = subprocess.run(
        _bench(question, *options), cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    answer = json.loads(answer_path.read_text(encoding="utf-8"))
    assert list(answer) == ["question", "state", "nbytes", "commit", "load", "rows", "ratios"]
    assert answer["question"] == question
    assert answer["nbytes"] == pytest.approx(2_000_000, rel=0.02)
    assert len(answer["load"]) == 3
    rows = {row["name"]: row for row in answer["rows"]}
    assert rows.keys() == RIVALS[question] | OURS[question] | LIMITS[question]
    for name, row in rows.items():
        assert list(row) == ["name", "seconds", "median_s", "gbps", "note"]
        assert len(row["seconds"]) == 1, f"{name} was not measured: {row['note']}"
        assert name in done.stdout
    ours = {f"{name}/limit" for name in OURS[question]}
    against = {f"{name}/ours" for name in RIVALS[question]}
    if question == "restore":
        ours |= {"ours-new/limit-new"}
        against |= {f"{name}/ours-new" for name in RIVALS[question]}
    assert answer["ratios"].keys() == ours | against
    assert list(work.iterdir()) == []


def test_an_interrupted_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    command = _bench("save", "--gb", "0.002", "--rounds", "1000000", "--only", "limit,torch.save", "--dir", tmp_path)
    with subprocess.Popen(command, cwd=ROOT, env=_environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("round 1 ") for line in process.stderr)
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_nobody_knows_is_an_error_that_lists_the_rows() -> None:
    with pytest.raises(SystemExit, match=r"nobody; there are a\b"), enter([_named("a")], ("nobody",)):
        pass


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughSpaceError, match="GB free"), workplace(tmp_path, 10**30):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_a_row_with_a_note() -> None:
    absent = _named("absent")
    absent.open = lambda: importlib.import_module("no_such_package")  # type: ignore[assignment, method-assign]
    with enter([_named("present"), absent], None) as field:
        assert [contender.name for contender in field.contenders] == ["present"]
        assert field.absent == (Row("absent", note="not installed: no_such_package"),)


def test_ratios_are_shares_of_the_limit_and_quotients_of_times() -> None:
    rows = (
        Row("limit", (1.0, 3.0, 2.0)),
        Row("ours", (2.5,)),
        Row("ours-first", (4.0,)),
        Row("torch.save", (5.0, 5.0)),
        Row("orbax", note="not installed: orbax"),
    )
    report = Report("save", "a state", 10**9, "unknown", (0.0, 0.0, 0.0), rows)
    assert report.ratios() == {"ours/limit": 0.8, "ours-first/limit": 0.5, "torch.save/ours": 2.0}
    absent = json.loads(report.json())["rows"][-1]
    assert absent == {"name": "orbax", "seconds": [], "median_s": None, "gbps": None, "note": "not installed: orbax"}
    assert "not installed: orbax" in report.table("a command")


def test_dcp_is_reported_at_its_better_thread_count() -> None:
    rows = (Row("ours", (1.0,)), Row("dcp-1", (3.0,), "1 thread"), Row("dcp-2", (2.0,), "2 threads"))
    assert better_dcp(rows) == (Row("ours", (1.0,)), Row("dcp", (2.0,), "2 threads; 1 thread: 3.00 s"))


def test_every_contender_runs_once_a_round_and_rounds_begin_with_different_ones() -> None:
    contenders = [_named(name) for name in "abc"]
    order: list[str] = []
    rows = measure(
        contenders,
        3,
        before=lambda _: None,
        clocked=lambda contender: order.append(contender.name),
        after=lambda *_: None,
    )
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert [len(row.seconds) for row in rows] == [3, 3, 3]
