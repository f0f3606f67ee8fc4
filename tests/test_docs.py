"""The pages say what the code does: their blocks run, their examples are read, what they name exists."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

import tierkeep_jax
import tierkeep_torch
from tierkeep import errors, options, tree
from tierkeep.format import dtypes
from tierkeep.format.checksum import crc32c, unseal
from tierkeep.format.part import VERSION, parse_part, parse_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FORMAT = ROOT / "docs" / "format.md"
SOURCE_ROOTS = {"core": "tierkeep", "torch_adapter": "tierkeep_torch", "jax_adapter": "tierkeep_jax"}

RANDOM = {"save_id", "image", "crc32c"}
"""The fields of a record that differ from save to save."""

OF_SAVES = {"DATA", "MANIFEST", "leaf_names", "ties"}
"""What a restore may take from `save/`: names and pure functions, nothing that writes."""

WORKER = "core/tierkeep/memory/worker.py"
"""A program of its own, started by name: it works on saves, and nothing imports it."""

BY_NAME = {"core/tierkeep/restore/locate.py": {"tierkeep_torch.torch_save"}}
"""Who may ask for a module of another package while it runs."""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(line, content) of every fenced block of that language."""
    text = _text(path)
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def _section(path: Path, heading: str) -> str:
    """What stands between a heading and the next one."""
    return re.split(r"^#+ ", _text(path).split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def _rows(text: str) -> list[list[str]]:
    """The cells of every table row, without heads and rulers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if re.fullmatch(r"[|: -]+", line)}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if number not in heads and number - 1 not in heads
    ]


def _code(cell: str) -> list[str]:
    return [word for span in re.findall(r"`([^`]+)`", cell) for word in span.split()]


def _run(block: tuple[int, str], path: Path, namespace: dict[str, Any]) -> None:
    """Runs a block with the page's own line numbers, so that a traceback points into the page."""
    line, content = block
    exec(compile("\n" * line + content, str(path), "exec"), namespace)  # noqa: S102  # our own pages


# README


def test_every_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    blocks = _blocks(ROOT / "README.md", "python")
    assert len(blocks) >= 3
    try:
        for block in blocks:
            _run(block, ROOT / "README.md", namespace)
    finally:
        if "orbax_v1" in namespace:
            namespace["orbax_v1"].close()  # else it keeps its memory and its process for the next save


def test_the_readme_names_every_public_name_and_relaxation() -> None:
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", _text(ROOT / "README.md")))))
    public = {*tierkeep_torch.__all__, *tierkeep_jax.__all__}
    relaxations = {"missing", "unexpected", "shape", "dtype", "pickle"}
    methods = {name for name in vars(tierkeep_torch.Checkpointer) if not name.startswith("_")}
    assert relaxations <= set(options.RestoreOptions.__dataclass_fields__)
    assert public | relaxations | methods <= words


# What pages refer to


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_link_and_test_that_a_page_names_exists(page: Path) -> None:
    text = _text(page)
    missing = [link for link in re.findall(r"\]\(([^):#]+)\)", text) if not (page.parent / link).exists()]
    roots = "|".join([*SOURCE_ROOTS, "tests", "bench", "examples", "docs"])
    for path, test in re.findall(rf"`((?:{roots})/[\w./-]*)(?:::(\w+))?`", text):
        if not (ROOT / path).exists() or (test and f"def {test}(" not in _text(ROOT / path)):
            missing.append(f"{path}::{test}" if test else path)
    assert missing == []


def test_every_invariant_names_a_test_or_says_that_it_is_not_proven() -> None:
    rows = _rows(_section(ROOT / "ARCHITECTURE.md", "## Invariants"))
    assert [row[0] for row in rows] == [f"I{number}" for number in range(1, 10)]
    assert all(re.search(r"`tests/[\w/.]+::test_\w+`|[Nn]ot proven yet", row[2]) for row in rows)


def test_the_architecture_names_every_module_of_the_core() -> None:
    text = _text(ROOT / "ARCHITECTURE.md")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))
    modules = {path.stem for path in (ROOT / "core" / "tierkeep").rglob("*.py") if path.stem != "__init__"}
    assert modules <= words


def test_every_error_in_the_tree_of_the_docstring_is_public() -> None:
    assert set(re.findall(r"\w+(?:Error|Warning)", errors.__doc__ or "")) >= set(errors.__all__)


# docs/format.md


def test_the_dtype_table_is_the_codes() -> None:
    documented = {
        name: (int(row[1]), row[2]) for row in _rows(_section(FORMAT, "## 6. Dtypes")) for name in _code(row[0])
    }
    known = {
        name: (dtype.itemsize, "the same" if dtype.zarr == name else f"`{dtype.zarr}`")
        for name, dtype in dtypes._TABLE.items()
    }
    assert documented == known


def test_the_version_is_the_codes() -> None:
    assert f"described here is **{VERSION}**" in _text(FORMAT)


def test_the_tags_of_plain_values_and_keys_are_the_codes() -> None:
    values = {tag for row in _rows(_section(FORMAT, "## 5. Plain values")) for tag in _code(row[0])}
    adapters = {
        "torch.dtype",
        "torch.layout",
        "torch.memory_format",
        "torch.device",
        "torch.save",
        "torch.save.ranks",
        "pickle",
    }
    assert values == {*tree._DECODERS, *tree._SETS, "slice"} | adapters

    tables = _rows(_section(FORMAT, "## 4. The tree"))
    tags = {tag for row in tables[-5:] for tag in _code(row[0])}
    keys = [1, True, None, 1.0, b"a", (1,)]
    assert tags == {tree.encode_key(key)[0] for key in keys}


def test_the_kinds_of_nodes_are_the_codes() -> None:
    kinds = {kind for row in _rows(_section(FORMAT, "## 4. The tree")) if len(row) == 3 for kind in _code(row[0])}
    written = set(re.findall(r'Node\("([\w.]+)"', "".join(_text(path) for path in _sources())))
    written |= set(
        re.findall(r'"(torch\.sparse_\w+)"', _text(ROOT / "torch_adapter" / "tierkeep_torch" / "adapter.py"))
    )
    assert kinds == written


def test_the_documented_fields_are_those_that_are_written(tmp_path: Path) -> None:
    for heading, record in zip(("### tierkeep.json", "### part.json"), _saved_example(tmp_path), strict=True):
        fields = [_code(row[0])[0] for row in _rows(_section(FORMAT, heading)) if row[0].startswith("`")]
        nested = record.get("structure") or record["layout"]
        assert fields == [*record, *nested]


def test_the_documented_records_are_what_is_written(tmp_path: Path) -> None:
    for documented, written in zip(_documented_records(), _saved_example(tmp_path), strict=True):
        assert list(documented) == list(written)
        for record in (documented, written):
            for field in RANDOM & record.keys():
                assert re.fullmatch(r"[0-9a-f]{8}|[0-9a-f]{32}", record[field])
                record[field] = ""
            for row in record["files"]:
                if row[0] == "manifest.ocdbt" or row[0].startswith("d/"):  # they hold random names, or have one
                    row[0], row[2] = re.sub(r"[0-9a-f]{32}", "", row[0]), ""
            if "parts" in record:
                record["parts"][0][2] = 0  # the checksum of a part with random names
                record["writer"] = record["writer"].split()[0]  # without the version
        assert documented == written


def test_the_documented_records_are_read() -> None:
    whole_data, part_data = (msgspec.json.encode(record) + b"\n" for record in _documented_records())
    assert unseal(whole_data)
    whole = parse_whole(whole_data)
    assert whole.parts == (("ocdbt.process_0", len(part_data), crc32c(part_data)),)
    part = parse_part(part_data, whole)
    assert part.chunks.keys() == {(number, 0) for number, leaf in enumerate(whole.leaves) if leaf.tie is None}


def _documented_records() -> tuple[dict[str, Any], dict[str, Any]]:
    whole, part = (json.loads(content) for _, content in _blocks(FORMAT, "json"))
    return whole, part


def _saved_example(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    namespace: dict[str, Any] = {"torch": torch}
    (block,) = _blocks(FORMAT, "python")
    _run(block, FORMAT, namespace)
    item = directory / "example"
    tierkeep_torch.save(namespace["state"], item)
    return json.loads(_text(item / "tierkeep.json")), json.loads(_text(item / "ocdbt.process_0" / "part.json"))


def test_a_checkpoint_holds_the_documented_files_and_no_others(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3), "note": "a string"}
    with tierkeep_torch.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(1, state)
    listing = _section(FORMAT, "## 1. Directories")
    names = {re.sub(r"[0-9a-f]{32}", "<32 hex>", path.name) for path in (tmp_path / "run").rglob("*")}
    assert names - {"1", "d"} <= set(re.findall(r"[\w.]+(?:\.\w+)?|<32 hex>", listing))


# Who may import whom


def test_imports_keep_to_the_rules() -> None:
    frameworks = {"jax", "jaxlib", "flax", "optax", "orbax", "torch", "tierkeep_jax", "tierkeep_torch"}
    own: dict[str, set[str]] = {
        "tierkeep": set(),
        "tierkeep_torch": {"torch", "tierkeep_torch"},
        "tierkeep_jax": {"jax", "jaxlib", "orbax", "tierkeep_jax"},
    }
    for path in _sources():
        package = path.relative_to(ROOT).parts[1]
        names = _imports(path) - BY_NAME.get(str(path.relative_to(ROOT)), set())
        assert not {name.split(".")[0] for name in names} & (frameworks - own[package]), path
        assert not any(name.startswith("tierkeep.memory.worker") for name in names), path
        if package != "tierkeep":
            continue
        stage = path.relative_to(ROOT).parts[2]
        inner = _of_core(names)
        if stage in ("format", "memory", "tiers"):
            above = {"save", "restore", "checkpointer", "engine", "adapter"}
            assert not inner & (above - {"save"} if path == ROOT / WORKER else above), path
        if stage == "save":
            assert not inner & {"restore", "checkpointer", "engine", "item"}, path
            assert "adapter" not in _of_core(_imports(path, types=False)), path
        if stage == "restore":
            assert {name.split(".")[-1] for name in names if name.startswith("tierkeep.save")} <= OF_SAVES, path


def _of_core(names: set[str]) -> set[str]:
    """The stages and modules of the core that names are of."""
    return {name.split(".")[1] for name in names if name.startswith("tierkeep.")}


def _sources() -> Iterator[Path]:
    for root, package in SOURCE_ROOTS.items():
        yield from sorted((ROOT / root / package).rglob("*.py"))


def _imports(path: Path, *, types: bool = True) -> set[str]:
    """The full name of everything that a file imports, at any depth and by name; with `types`, for types alone too."""
    package = path.relative_to(ROOT).with_suffix("").parts[1:-1]
    tree = ast.parse(_text(path))
    if not types:
        tree.body = [node for node in tree.body if not _is_for_types(node)]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return names


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        pytest.param("tierkeep, tierkeep.checkpointer", {"jax", "torch", "orbax"}, id="core"),
        pytest.param("tierkeep_torch", {"jax", "orbax", "tierkeep_jax"}, id="torch"),
        pytest.param("tierkeep_jax", {"torch", "tierkeep_torch"}, id="jax"),
    ],
)
def test_importing_a_package_loads_no_other_framework(modules: str, absent: set[str]) -> None:
    """I8: in a child process, since this one has loaded everything."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not absent & set(done.stdout.split())
