"""A preallocated cache for many sequences of different lengths, of keys and values and of recurrent states.

B sequences, T queries of a row, N new tokens, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sansgpu.kernels.attention import AttentionKernel, attention, causal_ranges, in_window
from sansgpu.kernels.packed_cache import PackedCache, PlainCache
from sansgpu.kernels.recurrent.sequences import LayerStates, last_inputs
from sansgpu.models.generation.state_slots import StateName, StateSlots


class SlotCache:
    """The keys and values of all layers.

    They are in the caches of a DecoderStep, `packed`, or else allocated in a layer's first forward pass. The sequences
    occupy the first slots, and the results of one do not depend on the others. Before each forward pass, call
    `start_prompts` or `start_step` to say where its tokens go. Both set, for each token of the pass, `positions`, its
    position in its sequence, and `places`, its index in the keys that `append` returns.
    """

    def __init__(self, slots: int, length: int, packed: Sequence[PackedCache] = ()) -> None:
        self.slots, self.length = slots, length
        self.lengths = torch.zeros(slots, dtype=torch.long)
        self.packed = packed
        self._plain: dict[int, PlainCache] = {}
        self._states = StateSlots(slots)

    @property
    def _layers(self) -> Sequence[PackedCache | PlainCache]:
        return self.packed or list(self._plain.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of the cached keys and values per token."""
        return sum(layer.nbytes for layer in self._layers) // (self.slots * self.length)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of a sequence."""
        return self._states.slot_bytes

    @property
    def starts(self) -> torch.Tensor:
        """The first token of each sequence of the pass, then their number: (B + 1,)."""
        if self._visible is not None:
            return torch.arange(self._visible.stop + 1)
        return torch.tensor([0, *accumulate(end - start for _, start, end in self._pieces)])

    @property
    def document_ids(self) -> torch.Tensor:
        """The slot of each token of the pass, (N,)."""
        return self._slots

    def start_prompts(self, first: int, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Prepares for a pass over tokens [start, start + count) of the sequences in the slots from `first` on.

        The tokens are concatenated in one row. Those before them in their sequences are cached.
        """
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self._pieces = list(zip(range(first, first + len(ends)), starts, ends, strict=True))
        self.lengths[first : first + len(ends)] = torch.tensor(ends)
        self._slots = torch.cat([torch.full((end - start,), slot) for slot, start, end in self._pieces])
        self.positions = torch.cat([torch.arange(start, end) for _, start, end in self._pieces])
        before = torch.tensor(ends).cumsum(0) - torch.tensor(ends)
        self.places = self.positions + torch.repeat_interleave(before, torch.tensor(counts))
        self._visible: slice | None = None

    def start_step(self, count: int) -> None:
        """Prepares for a decoding step: a pass over one token for each of the first `count` slots, one per row."""
        self._slots, self.positions = torch.arange(count), self.lengths[:count].clone()
        self.places = self.positions
        self.lengths[:count] += 1
        self._visible, self._longest = slice(0, count), int(self.lengths[:count].max())
        self._ranges = _up_to(self.lengths[:count, None])

    def keep(self, slots: Sequence[int]) -> None:
        """Moves the sequences in `slots`, in ascending order, to the first slots."""
        for to, slot in enumerate(slots):
            if to != slot:
                self.copy(to, slot, int(self.lengths[slot]))
        self.lengths[len(slots) :] = 0

    def copy(self, to: int, slot: int, count: int) -> None:
        """Copies the first `count` tokens of the sequence in `slot`, and its states after all, to the slot `to`."""
        for layer in self._layers:
            layer.move(to, slot, count)
        self._states.copy(to, slot)
        self.lengths[to] = count

    def copy_of(self, slot: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns a copy of the keys and values of the first `count` tokens of a slot, for `restore`."""
        pairs = (layer.first(slot, count) for layer in self._layers)
        return [(keys.clone(), values.clone()) for keys, values in pairs]

    def restore(self, slot: int, layers: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        """Makes the first `count` tokens of a copy the beginning of the sequence in a slot."""
        for layer, states in zip(self._layers, layers, strict=True):
            layer.restore(slot, states, count)
        self.lengths[slot] = count

    def append(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values of a pass; returns the keys and values to which its queries may attend.

        The inputs are (1, K, N, d), or (B, K, 1, d) in a decoding step. In a pass over prompts, the outputs are those
        of the sequences one after the other, with their cached tokens.
        """
        if layer not in self._plain:
            _, heads, _, dim = keys.shape  # some rotary embeddings widen keys to fp32, and attention narrows them
            self._plain[layer] = PlainCache(self.slots, self.length, heads, dim, values.dtype)
        by_token = [new[0].transpose(0, 1) if len(new) == 1 else new[:, :, 0] for new in (keys, values)]
        self._plain[layer].store(self._slots, self.positions, *by_token)
        if self._visible is not None:
            return self._plain[layer].read(self._visible, self._longest)
        if not any(start for _, start, _ in self._pieces):
            return keys, values
        pairs = [self._plain[layer].read(slice(slot, slot + 1), end) for slot, _, end in self._pieces]
        all_keys, all_values = (torch.cat(states, dim=2) for states in zip(*pairs, strict=True))
        return all_keys, all_values

    def states(self, name: StateName) -> torch.Tensor | None:
        """Returns a layer's states (B, ...) before a decoding step; None before prompts, which begin without one."""
        return None if self._visible is None else self._states.read(name, self._visible.stop)

    def store_states(self, name: StateName, states: torch.Tensor) -> None:
        """Stores a layer's states (B, ...) after a pass."""
        self._states.store(name, 0 if self._visible is not None else self._pieces[0][0], states)

    def store_inputs(self, name: StateName, inputs: torch.Tensor, count: int) -> None:
        """Stores the last `count` inputs of a layer's convolution, from the inputs (1, D, T) of a pass over prompts."""
        self.store_states(name, last_inputs(inputs, self.starts, count))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel, window: int | None = None
    ) -> torch.Tensor:
        """Computes attention from q, (1, H, N, d) or (B, H, 1, d), and the k and v that `append` returned.

        With a `window`, a query attends only to the last `window` tokens. Prompts are computed one by one, because the
        order of summation in a packed row would depend on the preceding prompts.
        """
        if self._visible is not None:
            return kernel(q, k, v, self._ranges if window is None else in_window(self._ranges, window))
        ends = [end for _, _, end in self._pieces]
        ranges = causal_ranges(torch.zeros(1, max(ends), dtype=torch.long))
        ranges = ranges if window is None else in_window(ranges, window)
        queries = q.split([end - start for _, start, end in self._pieces], dim=2)
        outs = [
            kernel(query, key, value, ranges[:, start:end])
            for query, key, value, (_, start, end) in zip(
                queries, k.split(ends, dim=2), v.split(ends, dim=2), self._pieces, strict=True
            )
        ]
        return torch.cat(outs, dim=2)


@dataclass(frozen=True)
class WindowedSlots:
    """The mask of layers whose queries attend only to the last `window` tokens of a `SlotCache`."""

    cache: SlotCache
    window: int

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
        return self.cache.attend(q, k, v, kernel, self.window)


class LayerSlots:
    """One layer of a `SlotCache`, with the interfaces `decoder.LayerCache` and `gated_delta.StateCache`."""

    length = 0  # because positions are always passed to the model, and the cache has its own key ranges

    def __init__(self, cache: SlotCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        return self._cache.attend(q, *self._cache.append(k, v, self._layer), attention)

    def states(self) -> LayerStates | None:
        inputs, memory = (self._cache.states(name) for name in self._state_names)
        return None if inputs is None or memory is None else LayerStates(inputs, memory)

    def store(self, states: LayerStates) -> None:
        for name, values in zip(self._state_names, states, strict=True):
            self._cache.store_states(name, values)

    @property
    def _state_names(self) -> tuple[StateName, StateName]:
        return StateName(self._layer, "inputs", 0), StateName(self._layer, "recurrent", 0)


def _up_to(ends: torch.Tensor) -> torch.Tensor:
    """Returns key ranges (B, T, 2) from 0 to `ends` (B, T)."""
    return torch.stack((torch.zeros_like(ends), ends), dim=-1).int()
