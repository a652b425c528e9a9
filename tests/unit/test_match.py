"""`If-Match`: what may stand there, and what it demands."""

from __future__ import annotations

import pytest

from tilewire.service.errors import InvalidRequest, PreconditionFailed
from tilewire.service.match import ANY, check_match, entity_tag, is_match, parse_match


@pytest.mark.parametrize(
    ("value", "versions", "others"),
    [
        ('"17"', [17], [1, 7]),
        ('"17", "18" ,"19"', [17, 18, 19], [1]),
        (',"17",, "18",', [17, 18], [0]),
        ("*", [0, 17], []),
        # Tags that are not ours, and weak ones, which never match.
        ('W/"17"', [], [17]),
        ('"abc", "17"', [17], [0]),
        ('""', [], [0]),
        ('"017"', [], [17]),
        ('"٣"', [], [3]),
        ('"' + "9" * 40 + '"', [], [9]),
    ],
)
def test_conditions_are_lists_of_versions(value: str, versions: list[int], others: list[int]) -> None:
    match = parse_match(value.encode().decode("latin-1"))
    assert all(is_match(match, version) for version in versions)
    assert not any(is_match(match, version) for version in others)
    assert not is_match(match, None)


@pytest.mark.parametrize("value", ["", ", ,", "17", '"17', '17"', '"1" "2"', "*, *", 'w/"1"', '"a b"'])
def test_what_is_no_list_is_400(value: str) -> None:
    with pytest.raises(InvalidRequest, match="if-match"):
        parse_match(value)


def test_without_a_condition_all_is_well() -> None:
    assert parse_match(None) is None
    check_match("w", None, None)
    check_match("w", ANY, 0)
    check_match("w", parse_match(entity_tag(5)), 5)
    with pytest.raises(PreconditionFailed, match="version 6"):
        check_match("w", (5,), 6)
    with pytest.raises(PreconditionFailed, match="no such tensor"):
        check_match("w", ANY, None)


@pytest.mark.parametrize(
    ("name", "version", "detail"),
    [
        ("w", 3, "if-match: 'w' has version 3"),
        ("w", None, "if-match: there is no such tensor"),
        ("program:mlp", 3, "if-match: 'mlp' has version 3"),
        ("program:mlp", None, "if-match: there is no such program"),
    ],
)
def test_a_refusal_says_what_is_there(name: str, version: int | None, detail: str) -> None:
    with pytest.raises(PreconditionFailed) as refused:
        check_match(name, (1,), version)
    assert refused.value.detail == detail
