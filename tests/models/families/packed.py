"""Compares packed examples of a patched model with separate examples of transformers' own."""

from typing import Any

import torch

from sansgpu.models.huggingface.packed_forward import UnpaddedModel

LENGTHS = (70, 3, 90)  # longer and shorter than windows and than the chunks of kernels


def assert_packed_equals_separate(plain: Any, patched: Any, vocabulary: int) -> None:
    """Requires packed examples to have the summed loss and the gradients that they have one after the other."""
    unpadded = UnpaddedModel(patched, pack=True)
    assert unpadded.packs
    lengths = torch.tensor(LENGTHS)
    tokens = torch.randint(3, vocabulary, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1)
    found, expected = unpadded.summed_loss(tokens, lengths, targets), torch.zeros(())
    found.backward()
    for ids, wanted in zip(tokens.split(lengths.tolist()), targets.split(lengths.tolist()), strict=True):
        logits = plain(ids[None]).logits[0].float()
        expected = expected + torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for (name, theirs), ours in zip(plain.named_parameters(), patched.parameters(), strict=True):
        if theirs.grad is not None:
            most = float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4 * most + 3e-6, msg=name)
