"""The states of recurrent layers in generation, for many sequences.

B sequences, T tokens, D channels, W inputs that a short convolution reads.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch


class StateName(NamedTuple):
    """Identifies a state: a layer may have several of each kind."""

    layer: int
    kind: Literal["inputs", "recurrent"]  # inputs: the last ones of a convolution
    number: int


class StateSlots:
    """The states of all recurrent layers, which are allocated in a layer's first pass.

    A state describes its whole sequence, so that unlike keys and values it cannot be cut to fewer tokens.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._stored: dict[StateName, torch.Tensor] = {}

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(stored.nbytes for stored in self._stored.values()) // self._slots

    def store(self, name: StateName, first: int, states: torch.Tensor) -> None:
        """Stores states (B, ...) of the sequences in the slots from `first` on."""
        if name not in self._stored:
            self._stored[name] = states.new_zeros(self._slots, *states.shape[1:])
        self._stored[name][first : first + len(states)] = states

    def read(self, name: StateName, count: int) -> torch.Tensor:
        """Returns a view of the states (count, ...) of the first slots, which layers may update in place."""
        return self._stored[name][:count]

    def copy(self, to: int, slot: int) -> None:
        for stored in self._stored.values():
            stored[to] = stored[slot]
