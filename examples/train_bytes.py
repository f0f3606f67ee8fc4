"""A small transformer that learns the sources of Python's standard library, byte by byte, and saves as it goes.

Start it again after it died, and it goes on from the newest whole step as if nothing had happened: same batches, same
dropout, same losses, bit for bit. `survive_a_crash.py` beside it proves that.

    python examples/train_bytes.py --root checkpoints
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tierkeep_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkeep.events import Event

__all__ = ["main"]

THREADS = 2
"""Fixed, because the number of threads decides in which order sums are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the model is and how long it trains."""

    width: int
    layers: int
    context: int
    batch: int
    table_rows: int  # most of the state: one row for each hash of three bytes in a row
    text_nbytes: int
    steps: int
    save_every: int


SMALL = Size(
    width=160, layers=3, context=128, batch=8, table_rows=1 << 17, text_nbytes=4_000_000, steps=36, save_every=3
)
TINY = Size(width=32, layers=1, context=32, batch=4, table_rows=1 << 12, text_nbytes=200_000, steps=12, save_every=2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a small transformer on bytes, saving as it goes.")
    parser.add_argument("--root", type=Path, help="where checkpoints go and are resumed from; none are made without it")
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    arguments = parser.parse_args(argv)
    train(TINY if arguments.tiny else SMALL, arguments.root)
    return 0


def train(size: Size, root: Path | None) -> None:
    """Train to the end, from the newest whole step under `root` if there is one; say on stdout what happens."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(THREADS)
    text = standard_library_sources(size.text_nbytes)
    model = ByteTransformer(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "rng": torch.get_rng_state()}

    with contextlib.ExitStack() as stack:
        checkpointer = None
        if root is not None:
            checkpointer = stack.enter_context(tierkeep_torch.Checkpointer(root, keep=2))
            checkpointer.events.subscribe(_say_committed)
            if checkpointer.latest_step() is not None:
                state = checkpointer.restore(into=state)
                torch.set_rng_state(state["rng"])
                _say("resumed", step=state["step"])
            checkpointer.prepare(state)  # its memory and its background process come while the first steps run

        for step in range(state["step"] + 1, size.steps + 1):
            # The batch and the dropout both come from torch's generator, so its state is part of the checkpoint.
            loss = model.loss(*_batch(text, size))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            _say("trained", step=step, loss=float(loss.detach()).hex())

            if checkpointer is not None and step % size.save_every == 0:
                state |= {"step": step, "rng": torch.get_rng_state()}
                _say("saving", step=step)
                began = time.perf_counter()
                checkpointer.save(step, state)
                _say("staged", step=step, seconds=time.perf_counter() - began)

    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    _say("finished", weights=weights.hexdigest())


def standard_library_sources(nbytes: int) -> torch.Tensor:
    """The first `nbytes` bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= nbytes:
            break
    return torch.frombuffer(text[:nbytes], dtype=torch.uint8).long()


class ByteTransformer(nn.Module):
    """A causal transformer over bytes whose input is a large table of hashed byte triples."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(size.table_rows, size.width)
        self.positions = nn.Parameter(torch.zeros(size.context, size.width))
        block = nn.TransformerEncoderLayer(
            size.width, nhead=size.width // 32, dim_feedforward=4 * size.width, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context))

    def loss(self, window: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        triple = window[:, :-2] * 65_599 + window[:, 1:-1] * 257 + window[:, 2:]
        x = self.table(triple % self.table.num_embeddings) + self.positions
        x = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(x.flatten(0, 1), following.flatten())


def _batch(text: torch.Tensor, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text, and for each byte triple in them the byte that follows."""
    starts = torch.randint(len(text) - size.context - 3, (size.batch, 1))
    window = text[starts + torch.arange(size.context + 3)]
    return window[:, :-1], window[:, 3:]


def _say_committed(event: Event) -> None:
    """Called in the thread that hears of it, while training goes on."""
    if event.what == "committed":
        _say("committed", step=event.step)


def _say(event: str, **facts: object) -> None:
    """One line of JSON. Whoever reads it may be gone: then the broken pipe ends this process too."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")  # in one piece: it is called from two threads
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
