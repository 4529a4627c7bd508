"""Computes the outputs of a model's frozen layers once for all sequences of the data, and caches them on the disk.

B sequences with N tokens in total, D width.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.schema import Config
from sansgpu.data.shards import cache_key, cached, lock_of
from sansgpu.events.progress import ReportProgress
from sansgpu.files.folders import delete_folder
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.probe import has_bf16_tensors, isa, mixed_precision
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.pretrained import weights_fingerprint
from sansgpu.models.huggingface.probes import close_outputs, copies_for_kernels, probe_tokens
from sansgpu.models.kept_states import DTYPES, KeptStates, activation_form, bytes_per_token, packed, sequence_key
from sansgpu.models.modules import narrowed_matrices
from sansgpu.tasks.capabilities import ActivationOwner

if TYPE_CHECKING:  # imports transformers, which takes seconds
    from sansgpu.models.huggingface.packed_forward import UnpaddedModel

FILE_TOKENS = 16384  # per file of the cache: a killed run loses little work, and there are few files
PASS_TOKENS = 4096  # per forward pass
READ_TOGETHER = 1024  # examples per batch in which the sequences are found
UNUSED_SECONDS = 7 * 86400  # files that no run has used for this long are deleted
PROBE_LENGTHS = [23, 9]  # tokens of the sequences on which skipping the frozen layers is tried
_FILE = "states.npy"


@dataclass(frozen=True)
class TokenSequences:
    """Sequences as the model gets them, concatenated."""

    tokens: torch.Tensor  # (N,) int64
    lengths: torch.Tensor  # (B,) int64
    types: torch.Tensor | None = None  # (N,) int64: token type ids, if the model uses them

    def split(self) -> Iterator[TokenSequences]:
        """Yields each sequence alone."""
        sizes = self.lengths.tolist()
        types = [None] * len(sizes) if self.types is None else self.types.split(sizes)
        for tokens, length, own in zip(self.tokens.split(sizes), self.lengths.split(1), types, strict=True):
            yield TokenSequences(tokens, length, own)

    @classmethod
    def joined(cls, parts: Sequence[TokenSequences]) -> TokenSequences:
        """Concatenates sequences, which all have token type ids or all have none."""
        types = [part.types for part in parts if part.types is not None]
        tokens, lengths = (torch.cat(values) for values in zip(*((p.tokens, p.lengths) for p in parts), strict=True))
        return cls(tokens, lengths, torch.cat(types) if types else None)

    @property
    def key(self) -> bytes:
        """The key of a single sequence in KeptStates."""
        return sequence_key(self.tokens.numpy(), None if self.types is None else self.types.numpy())


def batches_of(parts: Iterable[Any]) -> Iterator[Any]:
    """Yields all examples of some splits in batches."""
    for part in parts:
        for start in range(0, len(part), READ_TOGETHER):
            yield part.batch(np.arange(start, min(start + READ_TOGETHER, len(part))))


def distinct_sequences(found: Iterable[TokenSequences]) -> dict[bytes, TokenSequences]:
    """Returns each sequence once by its key, in the order of their first occurrence."""
    return {one.key: one for sequences in found for one in sequences.split()}


def chunks_of(sequences: Iterable[TokenSequences], tokens: int) -> Iterator[list[TokenSequences]]:
    """Yields consecutive sequences of about `tokens` tokens in total."""
    chunk: list[TokenSequences] = []
    size = 0
    for one in sequences:
        chunk.append(one)
        size += len(one.tokens)
        if size >= tokens:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class ActivationFiles:
    """The cached outputs of the frozen layers of a model. The processes of a machine share the work."""

    def __init__(
        self, unpadded: UnpaddedModel, model: ModelConfig, device: torch.device, precision: str, cache: Path
    ) -> None:
        self._unpadded, self._model, self._device, self._precision = unpadded, model, device, precision
        self._folder = cache / "activations"
        self._form = activation_form(model, precision)
        self._owned: list[Path] = []  # files that only this run uses

    def keep(
        self,
        sequences: dict[bytes, TokenSequences],
        progress: ReportProgress,
        group: Group,
        owner: ActivationOwner | None = None,
    ) -> str | None:
        """Computes what is missing in the cache, so that training skips the frozen layers.

        `owner` is the run that has trained the frozen weights, if one has; it alone uses the files, and may be
        interrupted. Returns the reason if keeping is not possible. Raises ConfigError if the disk is too small.
        """
        with self._as_in_training():
            dtype = self._dtype_if_repeatable()
            if isinstance(dtype, str):
                return dtype
            kept, local, missing = KeptStates(dtype), group.local_ranks, []
            question = self._question(owner)
            for chunk in chunks_of(sequences.values(), FILE_TOKENS):
                keys, lengths = [one.key for one in chunk], [len(one.tokens) for one in chunk]
                folder = self._folder / cache_key("activations", *question, keys)
                kept.add(keys, lengths, partial(self._read, folder, sum(lengths)))
                if owner is not None:
                    self._owned.append(folder)
                if folder.is_dir():
                    with suppress(OSError):
                        os.utime(folder)
                else:
                    missing.append((folder, chunk))
            self._require_disk([chunk for _, chunk in missing])
            for number in range(local.index(group.rank), len(missing), len(local)):
                if owner is not None and owner.is_interrupted():
                    break
                progress("computing the frozen layers", number, len(missing), "chunk")
                folder, chunk = missing[number]
                cached(folder, partial(self._write, chunk))
        if any(group.all_gather_object(owner is not None and owner.is_interrupted())):
            return None
        if group.rank == local[0]:
            self._delete_unused()
        self._unpadded.kept = kept
        return None

    def _question(self, owner: ActivationOwner | None) -> tuple[object, ...]:
        """Returns what the outputs of the frozen layers depend on, apart from the sequences."""
        assert self._unpadded.frozen is not None
        model = weights_fingerprint(self._model), self._model.trained_layers, self._model.base_precision
        machine = self._precision, self._form, isa(), torch.get_num_threads(), str(self._device)
        own = () if owner is None else (self._unpadded.frozen.learned_digest(), str(owner.folder.absolute()))
        return (*model, *machine, *own)

    def delete_owned(self) -> None:
        """Deletes the files that no other run uses. The model computes its frozen layers from then on."""
        self._unpadded.kept = None
        for folder in self._owned:
            delete_folder(folder)
            with suppress(OSError):
                lock_of(folder).unlink()
        self._owned = []

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Context in which the model computes without gradients and dropout, in the precision of training."""
        model, contexts = self._unpadded.model, ExitStack()
        model.to(self._device)  # type: ignore[arg-type]
        with contexts:
            for context in (
                reading(model),
                torch.no_grad(),
                narrowed_matrices(model) if has_bf16_tensors(self._precision) else nullcontext(),
                mixed_precision(self._device, self._precision),
            ):
                contexts.enter_context(context)
            yield

    def _dtype_if_repeatable(self) -> torch.dtype | str:
        """Returns the dtype of the states, or why the frozen layers cannot be skipped. Tries it on a few tokens."""
        unpadded, model = self._unpadded, self._unpadded.model
        assert unpadded.frozen is not None
        sizes = PROBE_LENGTHS * copies_for_kernels(sum(PROBE_LENGTHS))
        tokens, lengths = probe_tokens(model, sum(sizes)).to(self._device), torch.tensor(sizes, device=self._device)
        probe = TokenSequences(tokens, lengths)
        try:
            with torch.random.fork_rng(devices=[]):
                model.train()
                unpadded.frozen.without_dropout()
                states, again = self._states(probe), self._states(probe)
                model.eval()
            if not torch.equal(states, again):
                return "its frozen layers draw random numbers"
            plain, tried = unpadded.hidden_states(tokens, lengths), KeptStates(states.dtype)
            cpu = TokenSequences(tokens.cpu(), lengths.cpu())
            tried.add([one.key for one in cpu.split()], sizes, lambda: packed(states, "fp32"))
            unpadded.kept = tried
            skipping = unpadded.hidden_states(tokens, lengths)
        except Exception:  # anything that the code of a model may raise
            return "its blocks cannot be skipped"
        finally:
            unpadded.kept = None
        equal = close_outputs(model, skipping.float(), plain.float())
        return states.dtype if equal else "its trained blocks need more than the output of the last frozen one"

    def _states(self, sequences: TokenSequences) -> torch.Tensor:
        tokens, lengths = sequences.tokens.to(self._device), sequences.lengths.to(self._device)
        types = None if sequences.types is None else sequences.types.to(self._device)
        return self._unpadded.frozen_states(tokens, lengths, types).detach()

    def _require_disk(self, chunks: list[list[TokenSequences]]) -> None:
        width = int(self._unpadded.model.config.get_text_config().hidden_size)
        needed = bytes_per_token(self._form, width) * sum(len(one.tokens) for chunk in chunks for one in chunk)
        free = free_disk_bytes(self._folder.absolute())
        if needed > free:
            raise ConfigError(
                f"the kept activations need {needed / 1e9:.1f} GB, but {self._folder} has {free / 1e9:.1f} GB free; "
                "set model.keep_activations to false, or data.cache_dir to a folder on a larger disk."
            )

    def _write(self, chunk: list[TokenSequences], folder: Path) -> None:
        states = [self._states(TokenSequences.joined(part)) for part in chunks_of(chunk, PASS_TOKENS)]
        np.save(folder / _FILE, packed(torch.cat(states), self._form))

    def _read(self, folder: Path, tokens: int) -> np.ndarray:
        try:
            values: np.ndarray = np.load(folder / _FILE, mmap_mode="r", allow_pickle=False)
            if len(values) == tokens and values.ndim == 2 and values.dtype == DTYPES[self._form]:
                return values
        except (OSError, ValueError, EOFError):
            pass
        raise ConfigError(f"the kept activations in {folder} are damaged; delete that folder to compute them again.")

    def _delete_unused(self) -> None:
        with suppress(OSError):
            for folder in self._folder.iterdir():
                if folder.is_dir() and folder.stat().st_mtime < time.time() - UNUSED_SECONDS:
                    delete_folder(folder)


class KeepingTask:
    """Base of tasks that implement `KeepsActivations`; their objective is a `FineTuning`."""

    objective_class: ClassVar[type[Any]]
    objective: Any
    config: Config
    corpus: Any
    _files: ActivationFiles | None = None

    def keep_activations(
        self,
        device: torch.device,
        precision: str,
        cache: Path,
        progress: ReportProgress,
        group: Group,
        owner: ActivationOwner | None = None,
    ) -> str | None:
        self._files = ActivationFiles(self.objective.unpadded, self.config.model, device, precision, cache)
        return self._files.keep(self._kept_sequences(self.corpus), progress, group, owner)

    def forget_activations(self) -> None:
        self.objective.unpadded.kept = None

    def delete_activations(self) -> None:
        if self._files is not None:
            self._files.delete_owned()

    @classmethod
    def kept_tokens(cls, corpus: Any) -> int:
        """Returns the number of tokens whose activations are kept."""
        return sum(len(one.tokens) for one in cls._kept_sequences(corpus).values())

    @classmethod
    def _kept_sequences(cls, corpus: Any) -> dict[bytes, TokenSequences]:
        batches = batches_of((corpus.train, corpus.validation))
        return distinct_sequences(map(cls.objective_class.sequences, batches))
