"""What an interrupted tuning keeps: all that was whole, of this device and these sources."""

import logging

import pytest

from tilewire.kernels.autotune.journal import Journal

IDENTITY = {"device": "A card", "driver": "1"}


def test_a_journal_keeps_what_was_put(tmp_path):
    path = tmp_path / "a.jsonl"
    Journal(path, IDENTITY).put("one", {"us": [1.5, None]})
    again = Journal(path, IDENTITY)
    again.put("two", 2)
    assert Journal(path, IDENTITY).get("one") == {"us": [1.5, None]}
    assert Journal(path, IDENTITY).get("two") == 2
    assert Journal(path, IDENTITY).get("three") is None


@pytest.mark.parametrize("tail", [b"{\n", b"\xff\xfe\n", b'["torn", 1', b"[1, 2, 3]\n", b'"text"\n'])
def test_a_broken_line_of_a_journal_is_left_out(tmp_path, caplog, tail):
    path = tmp_path / "a.jsonl"
    Journal(path, IDENTITY).put("one", 1)
    path.write_bytes(path.read_bytes() + tail)
    with caplog.at_level(logging.WARNING):
        again = Journal(path, IDENTITY)
    assert "not a figure" in caplog.text
    again.put("two", 2)
    last = Journal(path, IDENTITY)
    assert (last.get("one"), last.get("two"), len(last)) == (1, 2, 2)


@pytest.mark.parametrize(
    "text", ["", "nonsense\n", '["one", 1]\n', '{"identity": {"device": "Another"}}\n["one", 1]\n']
)
def test_a_journal_of_something_else_is_begun_anew(tmp_path, caplog, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        journal = Journal(path, IDENTITY)
    assert "begun anew" in caplog.text
    assert len(journal) == 0
    journal.put("two", 2)
    assert Journal(path, IDENTITY).get("two") == 2
