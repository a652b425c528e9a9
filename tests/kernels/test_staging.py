"""Stretches of memory to and from one buffer, in the interpreter: every word, padded rows on either side, tails of blocks."""

import pytest
import torch

from kernels.staging.op import BLOCK, WORDS, copy_stretches, word_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("word", WORDS)
def test_stretches_of_every_length_arrive(word):
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
    sources = [torch.randint(-100, 100, (length,)).to(WORDS[word]) for length in lengths]
    whole = torch.full((sum(lengths),), 77, dtype=WORDS[word])
    pieces = whole.split(lengths)
    table = torch.tensor(
        [[source.data_ptr(), piece.data_ptr(), len(source)] for source, piece in zip(sources, pieces, strict=True)]
    )
    copy_stretches(table, max(lengths), word, device=CPU)
    assert torch.equal(whole, torch.cat(sources))


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_rows_are_padded_and_unpadded(rows):
    source = torch.randint(-100, 100, (rows, 7), dtype=torch.int32)
    padded = torch.full((rows, 8), 77, dtype=torch.int32)
    table = torch.tensor([[source.data_ptr(), padded.data_ptr(), source.numel()]])
    copy_stretches(table, source.numel(), 4, row_words=7, pitch_from=7, pitch_to=8, device=CPU)
    assert torch.equal(padded[:, :7], source)
    assert (padded[:, 7] == 77).all()

    back = torch.zeros_like(source)
    table = torch.tensor([[padded.data_ptr(), back.data_ptr(), source.numel()]])
    copy_stretches(table, source.numel(), 4, row_words=7, pitch_from=8, pitch_to=7, device=CPU)
    assert torch.equal(back, source)


def test_nothing_to_copy_launches_nothing():
    copy_stretches(torch.empty((0, 3), dtype=torch.int64), 0, 8, device=CPU)


@pytest.mark.parametrize(("alignment", "word"), [(0, 8), (256, 8), (12, 4), (6, 2), (7, 1), (8 | 4, 4)])
def test_the_widest_word_that_fits_is_chosen(alignment, word):
    assert word_bytes(alignment) == word
