"""Which heads count as the same, and which of their bytes are a request's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.raw_http import head
from tilewire.service.gateway.request.heads import MAX_HEAD_BYTES, form_of

HEAD = head("POST", "/v1/add?b=@w", content_length="10")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMED = head("POST", "/v1/add?b=@w", X_Request_ID="number-1", traceparent=TRACE, content_length="10")


@pytest.mark.parametrize("behind", [b"", b"x", b"\r\n\r\n", b"\r\nx-request-id: 1\r\n", HEAD])
def test_a_head_ends_at_its_empty_line(behind: bytes) -> None:
    form = form_of(HEAD + behind)
    assert form is not None
    assert (form.nbytes, form.pieces, form.blanks) == (len(HEAD), ((0, HEAD),), ())
    assert form.own(HEAD + b"anything") == {}


@pytest.mark.parametrize(
    "chunk",
    [
        b"",
        HEAD[:-1],
        HEAD.replace(b"POST", b"GET"),
        b"\r\n" + HEAD,
        # Ends of lines that some parser might take for the end of the head.
        b"POST / HTTP/1.1\n\nbody\r\n\r\n",
        b"POST / HTTP/1.1\r\na: b\r\r\nbody\r\n\r\n",
        b"POST / HTTP/1.1\r\na: b\n\r\nbody\r\n\r\n",
        b"POST /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        # Which of the two would it be?
        head("POST", "/v1/add", x_request_id="1", X_Request_Id="2"),
    ],
)
def test_what_is_no_plain_head_has_no_form(chunk: bytes) -> None:
    assert form_of(chunk) is None


def test_own_values_are_read_and_the_rest_is_the_same() -> None:
    form = form_of(NAMED)
    assert form is not None
    assert form.own(NAMED) == {"x-request-id": "number-1", "traceparent": TRACE}
    other = TRACE.replace("b7ad", "ffff")
    assert form.own(NAMED.replace(b"number-1", b" second ").replace(TRACE.encode(), other.encode())) == {
        "x-request-id": "second",
        "traceparent": other,
    }
    assert form_of(NAMED.replace(b"number-1", b"number-2")) == form


@pytest.mark.parametrize(
    "value",
    [
        b"a\r\nb: cd",
        b"number\n1",
        b"number\r1",
        b"number\x001",
        b"number\t1",
        b"number\x7f1",
        "numbér1".encode(),
        b"number-12",
        b"number-",
    ],
)
def test_what_a_parser_might_read_otherwise_is_another_head(value: bytes) -> None:
    form = form_of(NAMED)
    assert form is not None
    assert form.own(NAMED.replace(b"number-1", value)) is None


@pytest.mark.parametrize("size", range(0, len(NAMED), 7))
def test_a_part_of_a_head_does_not_fit(size: int) -> None:
    form = form_of(NAMED)
    assert form is not None
    assert form.own(NAMED[:size]) is None


@given(at=st.integers(0, len(NAMED) - 1), byte=st.integers(0, 255))
def test_another_byte_outside_of_the_own_values_is_another_head(at: int, byte: int) -> None:
    form = form_of(NAMED)
    assert form is not None
    changed = NAMED[:at] + bytes([byte]) + NAMED[at + 1 :]
    is_own = any(begin <= at < end for _, begin, end in form.blanks)
    fits = form.own(changed) is not None
    if is_own:
        assert fits == (0x20 <= byte < 0x7F)
    else:
        assert fits == (changed == NAMED)
