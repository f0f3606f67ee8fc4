"""The twin of `survive_a_crash.py` in JAX: flax nnx and optax, killed in the middle of saves, resumed exactly.

A small model learns the sources of Python's standard library byte by byte, twice: in one go without a checkpoint, and
in processes that get SIGKILL at a random moment during a save and are started again. Both must find the same losses
and end in the same parameters, bit for bit. Then torch opens the parameters of the last checkpoint.

    python examples/jax_nnx_loop.py
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tierkeep_jax

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

CONTEXT, WIDTH, HIDDEN, BATCH = 32, 64, 512, 16
STEPS, SAVE_EVERY = 12, 2
TEXT_NBYTES = 200_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, or with `--losses` train; 0 when every comparison held."""
    parser = argparse.ArgumentParser(description="JAX training that is killed during saves, and loses nothing.")
    parser.add_argument("--kills", type=int, default=1, help="how often the training is killed (default: 1)")
    parser.add_argument("--seed", type=int, help="which saves are hit, and when (default: another one each time)")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="the disk to work on (default: this directory)")
    parser.add_argument("--losses", type=Path, help="train, and append each step's loss here, a line of JSON")
    parser.add_argument("--root", type=Path, help="where a training's checkpoints go and are resumed from")
    arguments = parser.parse_args(argv)
    if arguments.losses is not None:
        train(arguments.root, arguments.losses)
        return 0
    with tempfile.TemporaryDirectory(prefix="demo-", dir=arguments.dir) as directory:
        demo(Path(directory), arguments.kills, random.Random(arguments.seed))
    return 0


# The training


class ByteModel(nnx.Module):
    """Predicts a byte from the ones before it. Its dropout has a generator of its own, which is part of its state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(256, WIDTH, rngs=rngs)
        self.inner = nnx.Linear(CONTEXT * WIDTH, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 256, rngs=rngs)

    def __call__(self, window: jax.Array) -> jax.Array:
        x = self.table(window).reshape(len(window), -1)
        return self.head(self.dropout(nnx.gelu(self.inner(x))))


def train(root: Path | None, losses: Path) -> None:
    """Train to the end, from the newest whole step under `root` if there is one; say on stdout what happens."""
    text = jnp.asarray(standard_library_sources(TEXT_NBYTES))
    graph, (params, rest) = _split(ByteModel(nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    advance = _make_step(graph, optimizer, text)
    # Everything that decides how the training goes on: any pytree will do.
    state = {
        "params": params,
        "rest": rest,  # the dropout's generator
        "optimizer": optimizer.init(params),
        "key": jax.random.key(1),  # of the batches
        "step": 0,
    }
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(losses.open("a", encoding="utf-8"))
        checkpointer = handle = None
        if root is not None:
            checkpointer = stack.enter_context(tierkeep_jax.Checkpointer(root, keep=2))
            if checkpointer.latest_step() is not None:
                state = checkpointer.restore(target=state)
                _say("resumed", step=state["step"])
        arrays = {name: value for name, value in state.items() if name != "step"}
        for step in range(state["step"] + 1, STEPS + 1):
            loss, arrays = advance(arrays)
            log.write(json.dumps({"step": step, "loss": float(loss).hex()}) + "\n")
            log.flush()
            if checkpointer is not None and step % SAVE_EVERY == 0:
                # The last save has ended in the background by now, or the next would wait for it.
                took = handle.result().seconds if handle else {"total": 0.0, "wait": 0.0}
                _say("saving", step=step, last_s=took["total"] - took["wait"])
                handle = checkpointer.save(step, arrays | {"step": step})
    _say("finished", digest=_digest(jax.tree.leaves(arrays["params"])))


def _split(model: ByteModel) -> tuple[Any, tuple[Any, Any]]:
    """Its structure; its parameters and the rest of its state."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    return graph, (states[0], states[1])


def _make_step(graph: Any, optimizer: optax.GradientTransformation, text: jax.Array) -> Callable[..., Any]:
    def loss_of(params: Any, rest: Any, window: jax.Array, following: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest, copy=True)  # its dropout counts on, in this trace
        loss = optax.softmax_cross_entropy_with_integer_labels(model(window), following).mean()
        return loss, _split(model)[1][1]

    @jax.jit
    def advance(arrays: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        key, batch = jax.random.split(arrays["key"])
        starts = jax.random.randint(batch, (BATCH, 1), 0, len(text) - CONTEXT - 1)
        window = text[starts + jnp.arange(CONTEXT + 1)]
        (loss, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            arrays["params"], arrays["rest"], window[:, :-1], window[:, -1]
        )
        updates, optimized = optimizer.update(gradients, arrays["optimizer"], arrays["params"])
        params = optax.apply_updates(arrays["params"], updates)
        return loss, {"params": params, "rest": rest, "optimizer": optimized, "key": key}

    return advance


def standard_library_sources(nbytes: int) -> np.ndarray[Any, Any]:
    """The first `nbytes` bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= nbytes:
            break
    return np.frombuffer(text[:nbytes], np.uint8).astype(np.int32)


def _digest(arrays: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def _say(event: str, **facts: object) -> None:
    """One line of JSON. Whoever reads it may be gone: then the broken pipe ends this process too."""
    print(json.dumps({"event": event, **facts}), flush=True)


# The demo


def demo(directory: Path, kills: int, chance: random.Random) -> None:
    root = directory / "checkpoints"
    print("1. Training in one go, without checkpoints.", flush=True)
    expected = run(directory / "undisturbed.jsonl", None)
    print("2. Training again with checkpoints, killed during saves.", flush=True)
    finished = None
    n_killed = 0
    while finished is None:
        # Each process lives through one save, so that the run goes forward whatever `chance` says.
        doomed = chance.randint(2, 3) if n_killed < kills else None
        finished = run(directory / "killed.jsonl", root, doomed, chance)
        n_killed += finished is None
    print("3. Comparing.", flush=True)
    n_repeated = compare_losses(directory / "undisturbed.jsonl", directory / "killed.jsonl")
    if finished != expected:
        raise AssertionError("the losses are equal, the final parameters are not")
    print(f"   {STEPS} steps, {n_repeated} of them computed twice, with equal losses; equal parameters")
    print("4. Opening the parameters in torch.", flush=True)
    print(f"   {compare_with_torch(root, expected)} tensors equal in torch")


def run(losses: Path, root: Path | None, doomed: int | None = None, chance: random.Random | None = None) -> str | None:
    """One training process: the digest of its parameters, None if it was killed in its save number `doomed`."""
    command = [sys.executable, __file__, "--losses", str(losses)]
    command += [] if root is None else ["--root", str(root)]
    digest, n_saves, saving, killed = None, 0, 0, False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said = json.loads(line)
                match said["event"]:
                    case "resumed":
                        print(f"   resumed from step {said['step']}", flush=True)
                    case "finished":
                        digest = str(said["digest"])
                    case "saving":
                        n_saves, saving = n_saves + 1, said["step"]
                        if chance is not None and n_saves == doomed:
                            time.sleep(chance.uniform(0.0, 0.9 * said["last_s"]))
                            process.kill()  # SIGKILL cannot be caught, delayed or cleaned up after
                            killed = True
        except BaseException:
            process.kill()
            raise
    if killed and digest is None:
        print(f"   killed in the save of step {saving}", flush=True)
    elif digest is None or process.returncode:
        raise ChildProcessError(f"training ended with status {process.returncode}; what it said is above")
    return digest


def compare_losses(expected: Path, found: Path) -> int:
    """Every loss found, repeated steps included, equals the expected one. How many steps were repeated."""
    by_step = dict(_read_losses(expected))
    losses = _read_losses(found)
    wrong = [step for step, loss in losses if by_step[step] != loss]
    if wrong or set(by_step) != set(dict(losses)):
        raise AssertionError(f"the losses differ in steps {wrong or 'that are missing'}")
    return len(losses) - len(by_step)


def compare_with_torch(root: Path, expected: str) -> int:
    """torch's tensors of the last checkpoint's parameters have the bits that training ended with. How many there are."""
    import torch

    import tierkeep_torch

    with tierkeep_torch.Checkpointer(root) as checkpointer:
        params = checkpointer.restore(keys=["params.*"])["params"]
    tensors = [tensor for _, layer in sorted(params.items()) for _, tensor in sorted(_tensors(layer))]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    if _digest([tensor.numpy() for tensor in tensors]) != expected:
        raise AssertionError("torch finds other bits in the parameters")
    return len(tensors)


def _tensors(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [found for name, value in tree.items() for found in _tensors(value, f"{path}.{name}")]


def _read_losses(path: Path) -> list[tuple[int, str]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(record["step"], record["loss"]) for record in records]


if __name__ == "__main__":
    sys.exit(main())
