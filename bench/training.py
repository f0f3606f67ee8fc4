"""A training loop that is real: a decoder of torch, AdamW, tokens made from a seed; the same on every run."""

from __future__ import annotations

import importlib
import math
from typing import Any

from bench.state import State, Tree, flatten

__all__ = ["Training"]

N_LAYERS = 8
HEADS = 8
SEQUENCE = 64
"""Tokens of one sequence, at most."""
VOCABULARY_PER_WIDTH = 16
BYTES_PER_PARAMETER = 12
"""A parameter and its two moments, all float32."""


class Training:
    """Model and optimizer, one set of them for every contender, so that none has better memory than another.

    Guarantees: after `reset`, `step` gives the same losses as after every other one.
    """

    def __init__(self, mb: float, n_tokens: int) -> None:
        torch: Any = importlib.import_module("torch")
        # Parameters of the layers and, in and out, of the vocabulary, in squares of the width.
        squares = 12 * N_LAYERS + 2 * VOCABULARY_PER_WIDTH
        width = HEADS * max(1, round(math.sqrt(mb * 1e6 / BYTES_PER_PARAMETER / squares) / HEADS))
        self._torch = torch
        self._vocabulary = VOCABULARY_PER_WIDTH * width
        self._sequence = min(SEQUENCE, n_tokens)
        self._n_sequences = max(1, n_tokens // self._sequence)
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self._embedding = torch.nn.Embedding(self._vocabulary, width)
        self._layers = torch.nn.TransformerEncoder(layer, N_LAYERS, enable_nested_tensor=False)
        self._head = torch.nn.Linear(width, self._vocabulary, bias=False)
        self._model = torch.nn.ModuleList([self._embedding, self._layers, self._head])
        self._mask = torch.nn.Transformer.generate_square_subsequent_mask(self._sequence)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._number = 0
        self.step()  # makes the moments
        self._start = {name: leaf.clone() for name, leaf in flatten(self.tree()) if hasattr(leaf, "dtype")}
        self.label = (
            f"training of an {N_LAYERS}-layer decoder of width {width} with AdamW, "
            f"{self._n_sequences * self._sequence} tokens a step"
        )

    def reset(self) -> None:
        """Start again from the first step."""
        self._number = 1
        with self._torch.no_grad():
            for name, leaf in flatten(self.tree()):
                if name in self._start:
                    leaf.copy_(self._start[name])

    def step(self) -> float:
        """Forward, backward and the optimizer's step; the loss."""
        torch = self._torch
        tokens = torch.randint(
            self._vocabulary,
            (self._n_sequences, self._sequence + 1),
            generator=torch.Generator().manual_seed(self._number),
        )
        self._number += 1
        found = self._layers(self._embedding(tokens[:, :-1]), mask=self._mask, is_causal=True)
        loss = torch.nn.functional.cross_entropy(self._head(found).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def tree(self) -> Tree:
        """What is saved: the tensors that the next step changes, and where training is."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self._number,
        }

    def state(self) -> State:
        """The same as a contender takes it."""
        tree = self.tree()
        nbytes = sum(leaf.nbytes for _, leaf in flatten(tree) if hasattr(leaf, "dtype"))
        return State(self.label, tree, "torch", nbytes)
