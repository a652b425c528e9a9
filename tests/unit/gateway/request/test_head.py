"""Which heads count as the same, and which are left to the parser."""

import pytest

from tilewire.service.gateway.request.head import OWN_HEADERS, READ_HEADERS, key_of, read_head

FIRST = b"POST /v1/matmul?b=@w HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n"


def head(*lines: bytes) -> bytes:
    return FIRST + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def test_what_nobody_reads_makes_no_other_head() -> None:
    plain = key_of(head())
    assert plain is not None
    for lines in (
        (b"User-Agent: one",),
        (b"user-agent: two", b"Cookie: a=b; c=\xe4", b"cookie: again"),
        (b"X-Empty:", b"X-Tab: a\tb"),
        (b"X-Number: 000000000001", b"x-request-id: mine"),
    ):
        key = key_of(head(*lines))
        assert key is not None
        assert key.text == plain.text
        assert key.nbytes == len(head(*lines))


@pytest.mark.parametrize("name", sorted(READ_HEADERS))
def test_what_is_read_makes_another_head(name: str) -> None:
    line = name.title().encode("ascii")
    one, other = key_of(head(line + b": 1")), key_of(head(line + b": 2"))
    assert one is not None
    assert other is not None
    assert one.text != other.text


@pytest.mark.parametrize("name", sorted(OWN_HEADERS))
def test_own_values_are_taken_out(name: str) -> None:
    line = name.title().encode("ascii")
    key = key_of(head(b"Accept: */*", line + b":  value ", b"X-Last: 1"))
    assert key is not None
    assert key.own == {name: "value"}
    assert b"value" not in key.text
    assert key_of(head(line + b": 1", line.lower() + b": 1")) is None


@pytest.mark.parametrize(
    "line",
    [
        b"X-Name : 1",
        b" X-Name: 1",
        b"X Name: 1",
        b"X-Name",
        b": 1",
        b"X-Name: a\nHost: other",
        b"X-Name: a\rb",
        b"X-Name: a\0b",
        b"X-Name: a\x7fb",
        b"X-Request-Id: a\tb",
        b"X-Request-Id: \xe4",
    ],
)
def test_a_line_that_a_parser_may_read_otherwise_is_left_to_it(line: bytes) -> None:
    assert key_of(head(line)) is None


def test_only_whole_heads_of_posts_have_keys() -> None:
    assert key_of(head()[:-2]) is None
    assert key_of(head().replace(b"POST", b"PUT")) is None
    assert key_of(head(b"X-Long: " + b"a" * 4096)) is None


def test_a_head_has_no_header_that_is_not_listed() -> None:
    headers = [(b"x-name", b"1"), (b"host", b"a"), (b"host", b"b"), (b"traceparent", b"t")]
    found, own = read_head("POST", "/", b"", headers)
    assert found.headers == {"host": "b"}
    assert found.repeated == {"host"}
    assert own == {"traceparent": "t"}


def test_space_around_a_value_is_no_part_of_it() -> None:
    raw = [(b"x-timeout-ms", b" 5000\t"), (b"x-request-id", b"mine \t"), (b"if-match", b'"1" ')]
    read, own = read_head("POST", "/v1/add", b"", raw)
    assert read.headers == {"x-timeout-ms": "5000", "if-match": '"1"'}
    assert own == {"x-request-id": "mine"}


def test_lines_of_one_list_are_joined() -> None:
    raw = [(b"if-none-match", b'"1"'), (b"accept", b"text/html"), (b"if-none-match", b'"2"'), (b"if-match", b'"3"')]
    read, _ = read_head("GET", "/v1/tensors/w", b"", [*raw, (b"if-match", b'"4"')])
    assert read.headers == {"if-none-match": '"1", "2"', "accept": "text/html", "if-match": '"4"'}
    assert read.repeated == {"if-none-match", "if-match"}
