"""Ranges of memory to and from one buffer, in the interpreter: every word, padded rows on either side, tails of blocks."""

import numpy as np
import pytest
import torch

from tilewire.kernels.copy.op import BLOCK, WORDS, CopyPlan, CopyRange, copy_ranges, self_test, word_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("word", WORDS)
def test_stretches_of_every_length_arrive(word):
    lengths = [word * words for words in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)]
    sources = [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths]
    whole = torch.full((sum(lengths),), 77, dtype=torch.uint8)
    ranges = [
        CopyRange(source.data_ptr(), piece.data_ptr(), source.numel())
        for source, piece in zip(sources, whole.split(lengths), strict=True)
    ]
    assert word_bytes(np.array(ranges)) == word
    copy_ranges(ranges, CPU)
    assert torch.equal(whole, torch.cat(sources))


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_rows_are_padded_and_unpadded(rows):
    source = torch.randint(-100, 100, (rows, 7), dtype=torch.int32)
    other = torch.randint(-100, 100, (5, 8), dtype=torch.int32)
    padded = torch.full((rows, 8), 77, dtype=torch.int32)
    copied = torch.full((5, 8), 77, dtype=torch.int32)
    copy_ranges(
        [
            CopyRange(source.data_ptr(), padded.data_ptr(), rows * 28, row_bytes=28, pitch_from=28, pitch_to=32),
            CopyRange(other.data_ptr(), copied.data_ptr(), 160),
        ],
        CPU,
    )
    assert torch.equal(padded[:, :7], source)
    assert (padded[:, 7] == 77).all()
    assert torch.equal(copied, other)

    back = torch.zeros_like(source)
    copy_ranges(
        [CopyRange(padded.data_ptr(), back.data_ptr(), rows * 28, row_bytes=28, pitch_from=32, pitch_to=28)], CPU
    )
    assert torch.equal(back, source)


def test_nothing_to_copy_launches_nothing():
    assert copy_ranges([], CPU) is None
    assert copy_ranges([CopyRange(0, 0, 0)], CPU) is None


@pytest.mark.parametrize(("nbytes", "word"), [(256, 8), (12, 4), (6, 2), (7, 1)])
def test_the_widest_word_that_fits_is_chosen(nbytes, word):
    assert word_bytes(np.array([CopyRange(0, 256, 512), CopyRange(512, 0, nbytes)])) == word


@pytest.mark.parametrize("is_gather", [True, False])
def test_a_prepared_copy_serves_places_that_change(is_gather):
    """Two ranges of unequal lengths, one of padded rows, to and from other places each time."""
    device = torch.zeros(2, 40, dtype=torch.int32)
    rows, flat = device[0, :8].view(2, 4), device[1, :9]
    shapes = [
        CopyRange(0, 0, 24, row_bytes=12, pitch_from=12 if is_gather else 16, pitch_to=16 if is_gather else 12),
        CopyRange(0, 0, 36),
    ]
    name = "destination" if is_gather else "source"
    prepared = CopyPlan(
        [one._replace(**{name: whole.data_ptr()}) for one, whole in zip(shapes, (rows, flat), strict=True)],
        CPU,
        is_gather=is_gather,
    )
    assert prepared.word == 4
    for seed in range(3):
        torch.manual_seed(seed)
        hosts = torch.randint(-100, 100, (6,), dtype=torch.int32), torch.randint(-100, 100, (9,), dtype=torch.int32)
        if not is_gather:
            rows.copy_(torch.randint(-100, 100, (2, 4)))
            flat.copy_(torch.randint(-100, 100, (9,)))
        prepared([host.data_ptr() for host in hosts])
        assert torch.equal(rows[:, :3], hosts[0].view(2, 3))
        assert torch.equal(flat, hosts[1])


@pytest.mark.parametrize("word", WORDS)
def test_a_self_test_holds_the_table_that_its_launch_reads(word):
    tried = self_test(word, True, CPU)
    assert bool(tried.is_right)
    # A launch reads it over the bus later: memory that was given back would be another test's table by then.
    assert tried.held is not None
    assert tried.held[0, 2:].tolist() == [16, 8, 8, 16]
