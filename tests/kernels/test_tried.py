"""The note that a device has passed its self-tests: found for the same bytes there, and for nothing else."""

import dataclasses
import hashlib
import json

import pytest

from tilewire.kernels.build.tried import Place, keep, note_of
from tilewire.kernels.runtime.launch import Loaded, Variant

HERE = Place("GPU-1", "driver 1")
VARIANTS = tuple(Variant(print, (), (("BLOCK", block),), (), ()) for block in (16, 32))


def loaded(*images):
    """The binaries of VARIANTS."""
    return {
        variant: Loaded(None, None, hashlib.sha256(image).digest())
        for variant, image in zip(VARIANTS, images, strict=True)
    }


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty kernel cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_note_is_found_by_the_next_start(cache):
    keep(note_of(HERE, loaded(b"one", b"two"), VARIANTS), HERE, 2)
    note = note_of(HERE, loaded(b"one", b"two"), VARIANTS)
    assert json.loads(note.read_text()) == {"device": "GPU-1", "driver": "driver 1", "binaries": 2}
    assert [path.name for path in cache.iterdir()] == [note.name]


@pytest.mark.parametrize(
    ("place", "images"),
    [
        (dataclasses.replace(HERE, device="GPU-2"), (b"one", b"two")),
        (dataclasses.replace(HERE, driver="driver 2"), (b"one", b"two")),
        (HERE, (b"one", b"2")),
        (HERE, (b"two", b"one")),
    ],
    ids=["another device", "another driver", "another byte", "exchanged"],
)
def test_whatever_changes_is_tried_again(place, images):
    keep(note_of(HERE, loaded(b"one", b"two"), VARIANTS), HERE, 2)
    assert not note_of(place, loaded(*images), VARIANTS).exists()


def test_a_cache_that_is_gone_is_no_failure(cache):
    note = note_of(HERE, loaded(b"one", b"two"), VARIANTS)
    cache.rmdir()
    keep(note, HERE, 2)
    assert not note.exists()
