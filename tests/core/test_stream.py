"""Copies past the caches: the same bytes as numpy's copy, whatever the length, the alignment and the layout."""

from __future__ import annotations

import numpy as np
import pytest

from tierkeep.memory import stream as module
from tierkeep.memory.stream import stream, stream_pairs

GUARD = 0xA5


@pytest.fixture(params=["native", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(module, "_stream", None)
    elif not module.NATIVE:
        pytest.skip("tierkeep was installed without a compiler")
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("nbytes", [0, 1, 15, 63, 64, 65, 1023, 1024, 1025, 1087, 1088, 4096, 5000, 70_001])
def test_every_byte_and_no_other_is_copied_at_every_alignment(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    for out_at, source_at in [(0, 0), (0, 1), (1, 0), (3, 7), (15, 16), (63, 5), (64, 64)]:
        memory = np.full(nbytes + 192, GUARD, np.uint8)
        source = rng.integers(0, 256, nbytes + 64, np.uint8)[source_at : source_at + nbytes]
        stream(memory[64 + out_at : 64 + out_at + nbytes], source)
        assert np.array_equal(memory[64 + out_at : 64 + out_at + nbytes], source)
        assert (memory[: 64 + out_at] == GUARD).all()
        assert (memory[64 + out_at + nbytes :] == GUARD).all()


@pytest.mark.usefixtures("way")
def test_pairs_of_any_layout_and_width_are_copied() -> None:
    rng = np.random.default_rng(1)
    sources = [
        rng.integers(0, 256, (40, 30), np.uint8),
        np.asfortranarray(rng.integers(0, 1 << 16, (40, 30), np.uint16)),
        rng.integers(0, 1 << 32, (40, 60), np.uint32)[:, ::2],
        rng.integers(0, 1 << 62, 5000, np.uint64)[::-1],
        np.full((), 7, np.uint32),
        rng.random(300).astype(np.complex128),
        rng.integers(0, 256, (0, 3), np.uint8),
    ]
    outs = [np.zeros(source.shape, source.dtype) for source in sources]
    wide = np.zeros((40, 60), np.uint32)
    sources.append(sources[2])
    outs.append(wide[:, 1::2])
    for source in sources:
        source.flags.writeable = False
    stream_pairs(list(zip(outs, sources, strict=True)))
    for out, source in zip(outs, sources, strict=True):
        assert np.array_equal(out, source)
    assert not wide[:, ::2].any()


@pytest.mark.usefixtures("way")
def test_a_pair_of_unequal_length_is_refused_and_nothing_is_written_past_it() -> None:
    memory = np.full(96, GUARD, np.uint8)
    with pytest.raises(ValueError, match=r"80 bytes into 64|shape"):
        stream_pairs([(memory[:64], np.zeros(80, np.uint8))])
    assert (memory == GUARD).all()


@pytest.mark.usefixtures("way")
def test_memory_that_may_not_be_written_is_not() -> None:
    out = np.zeros(5000, np.uint8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        stream(out, np.ones(5000, np.uint8))
    assert not out.any()
