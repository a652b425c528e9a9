r"""Cases of HTTP/1.1 conformance, framing and smuggling: bytes to send, and which outcomes are right.

The identifiers are those of Http11Probe (https://github.com/MDA2AV/Http11Probe, MIT), whose ideas these cases follow. The
bytes and rules are our own. Its nine cases of caching and five of cookies do not apply: this service has neither.

Placeholders in what is sent:
- `<get>`: a target that GET answers with 200; `<post>`: one that takes `<body>`, `<n>` bytes long (`<n+1>`: one more);
- `<empty>`: a target of POST that needs no body; `<host>`: the server's own `host:port`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.raw_http import Answer

# What came of a case. An answer gives its status, its class (`2xx`) and either of those with `close` or `open` behind it.
CLOSE, WAIT = "close", "wait"


@dataclass(frozen=True)
class Rule:
    """Which outcomes are right.

    Attributes:
        passes: Outcomes that conform.
        warns: Outcomes that the standard allows, and that a careful server avoids.
        max_answers: Largest number of answers to what was sent first; more means that a body was taken for a request.
    """

    passes: frozenset[str]
    warns: frozenset[str] = frozenset()
    max_answers: int = 2**31


def rule(passes: str, warns: str = "", max_answers: int = 2**31) -> Rule:
    """Outcomes from text: separated by commas."""
    return Rule(_split(passes), _split(warns), max_answers)


def _split(text: str) -> frozenset[str]:
    return frozenset(one.strip() for one in text.split(",") if one)


@dataclass(frozen=True)
class Case:
    """One exchange.

    Attributes:
        name: Http11Probe's identifier.
        sends: What is sent, each after the answer before it.
        rule: Outcomes of the first of them that are right.
        check: Further condition on the last answer to the first; None for none.
        then: Rule of the outcome of the second, when the connection is still open for it.
    """

    name: str
    sends: tuple[str, ...]
    rule: Rule
    check: Callable[[Answer], bool] | None = None
    then: Rule | None = None


REJECT = rule("400, close")
REJECT_400 = rule("400")
ACCEPT = rule("2xx")
UNFINISHED = rule("400, close, wait")
EITHER = rule("400, 2xx")
PREFER_400 = rule("400, close", "2xx")
CODING = rule("400, 501, close")
TOO_LONG = rule("400, 414, 431, close")
NOT_SWITCHED = rule("2xx, 4xx, 5xx, close")
AMBIGUOUS = rule("400, close", "2xx close")
ONE_ANSWER = rule("400, 501, close", "", 1)
SMUGGLED = rule("400, 501, close, 2xx close", "", 1)

GET = "GET <get> HTTP/1.1\r\nHost: <host>\r\n"
POST = "POST <post> HTTP/1.1\r\nHost: <host>\r\nContent-Type: application/json\r\n"
END = "\r\n"
LENGTH = "Content-Length: <n>\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
CHUNKS = "<x>\r\n<body>\r\n0\r\n\r\n"
FOLLOWS = GET + END
SOCKET = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
LONG = 100_000
LONG_TARGET = 7900


def _start_line() -> Iterator[Case]:
    host = "Host: <host>\r\n\r\n"
    yield Case("COMP-BASELINE", (FOLLOWS,), ACCEPT)
    yield Case("RFC9112-2.2-BARE-LF-REQUEST-LINE", ("GET <get> HTTP/1.1\n" + host,), PREFER_400)
    yield Case("RFC9112-3-MULTI-SP-REQUEST-LINE", ("GET  <get>  HTTP/1.1\r\n" + host,), PREFER_400)
    yield Case("RFC9112-2.3-INVALID-VERSION", ("GET <get> HTTP/9.9\r\n" + host,), rule("400, 505, close"))
    yield Case("RFC9112-3-CR-ONLY-LINE-ENDING", ("GET <get> HTTP/1.1\r" + host,), REJECT_400)
    yield Case("RFC9112-3-MISSING-TARGET", ("GET HTTP/1.1\r\n" + host,), REJECT)
    yield Case("RFC9112-3.2-FRAGMENT-IN-TARGET", ("GET <get>#part HTTP/1.1\r\n" + host,), PREFER_400)
    yield Case("RFC9112-2.3-HTTP09-REQUEST", ("GET <get>\r\n",), UNFINISHED)
    yield Case("COMP-ASTERISK-WITH-GET", ("GET * HTTP/1.1\r\n" + host,), REJECT)
    yield Case("COMP-OPTIONS-STAR", ("OPTIONS * HTTP/1.1\r\n" + host,), ACCEPT)
    yield Case("COMP-LEADING-CRLF", ("\r\n\r\n" + FOLLOWS,), EITHER)
    yield Case("COMP-ABSOLUTE-FORM", ("GET http://<host><get> HTTP/1.1\r\n" + host,), rule("2xx", "400"))
    yield Case("COMP-METHOD-CASE", ("get <get> HTTP/1.1\r\n" + host,), rule("400, 405, 501", "2xx"))
    yield Case(
        "COMP-METHOD-CONNECT",
        ("CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",),
        rule("400, 405, 501, close"),
    )
    yield Case("COMP-METHOD-TRACE", ("TRACE <get> HTTP/1.1\r\n" + host,), rule("405, 501", "2xx"))
    yield Case("COMP-UNKNOWN-METHOD", ("FOOBAR <get> HTTP/1.1\r\n" + host,), rule("400, 405, 501, close"))
    yield Case("COMP-REQUEST-LINE-TAB", ("GET\t<get>\tHTTP/1.1\r\n" + host,), PREFER_400)
    for name, version in (
        ("COMP-VERSION-MISSING-MINOR", "HTTP/1"),
        ("COMP-VERSION-LEADING-ZEROS", "HTTP/01.01"),
        ("COMP-VERSION-WHITESPACE", "HTTP/ 1.1"),
        ("COMP-VERSION-CASE", "http/1.1"),
    ):
        yield Case(name, (f"GET <get> {version}\r\n{host}",), REJECT)
    yield Case("COMP-HTTP12-VERSION", ("GET <get> HTTP/1.2\r\n" + host,), rule("2xx, 400, 505"))
    yield Case("COMP-LONG-URL-OK", (f"GET /{'a' * LONG_TARGET} HTTP/1.1\r\n{host}",), rule("2xx, 404"))
    yield Case("COMP-SPACE-IN-TARGET", ("GET <get>/pa th HTTP/1.1\r\n" + host,), REJECT)
    yield Case(
        "SMUG-ABSOLUTE-URI-HOST-MISMATCH",
        ("GET http://other.example.com<get> HTTP/1.1\r\n" + host,),
        rule("400", "2xx"),
    )
    yield Case("MAL-NUL-IN-URL", ("GET <get>\0test HTTP/1.1\r\n" + host,), REJECT)
    yield Case("MAL-NON-ASCII-URL", ("GET <get>\xc3\xa9 HTTP/1.1\r\n" + host,), REJECT)
    yield Case("MAL-URL-OVERLONG-UTF8", ("GET <get>\xc0\xaf HTTP/1.1\r\n" + host,), REJECT)
    yield Case("MAL-URL-BACKSLASH", ("GET <get>\\file HTTP/1.1\r\n" + host,), rule("400, 404", "2xx"))
    yield Case("MAL-URL-PERCENT-NULL", ("GET <get>%00.html HTTP/1.1\r\n" + host,), rule("400, 404", "2xx"))
    yield Case(
        "MAL-URL-PERCENT-CRLF",
        ("GET <get>%0d%0aX-Injected:%20true HTTP/1.1\r\n" + host,),
        rule("400, 404", "2xx"),
        _not_injected,
    )
    yield Case("MAL-LONG-URL", (f"GET /{'A' * LONG} HTTP/1.1\r\n{host}",), TOO_LONG)
    yield Case("MAL-LONG-METHOD", (f"{'A' * LONG} <get> HTTP/1.1\r\n{host}",), TOO_LONG)
    yield Case("MAL-BINARY-GARBAGE", ("\x97\x03\xfe\x1b\x80\xa9\x7f\r\n" * 28,), UNFINISHED)
    yield Case("MAL-INCOMPLETE-REQUEST", (GET + "X-Test: value",), UNFINISHED)
    yield Case("MAL-EMPTY-REQUEST", ("",), UNFINISHED)
    yield Case("MAL-WHITESPACE-ONLY-LINE", ("   \r\n\r\n",), UNFINISHED)
    yield Case("MAL-H2-PREFACE", ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), rule("400, 505, close, wait"))


def _headers() -> Iterator[Case]:
    yield Case("RFC9112-2.2-BARE-LF-HEADER", ("GET <get> HTTP/1.1\r\nHost: <host>\nX-Test: value\r\n\r\n",), PREFER_400)
    yield Case("RFC9112-5.1-OBS-FOLD", (GET + "X-Test: value\r\n continued\r\n\r\n",), REJECT_400)
    yield Case("RFC9110-5.6.2-SP-BEFORE-COLON", (GET + "X-Test : value\r\n\r\n",), REJECT_400)
    yield Case("RFC9112-7.1-MISSING-HOST", ("GET <get> HTTP/1.1\r\n\r\n",), REJECT_400)
    yield Case("RFC9112-5-EMPTY-HEADER-NAME", (GET + ": empty-name\r\n\r\n",), REJECT)
    yield Case("RFC9112-5-INVALID-HEADER-NAME", (GET + "Bad[Name: value\r\n\r\n",), REJECT)
    yield Case("RFC9112-5-HEADER-NO-COLON", (GET + "NoColonHere\r\n\r\n",), REJECT)
    yield Case("RFC9110-5.4-DUPLICATE-HOST", (GET + "Host: other.example.com\r\n\r\n",), REJECT_400)
    yield Case("COMP-DUPLICATE-HOST-SAME", (GET + "Host: <host>\r\n\r\n",), REJECT_400)
    yield Case("COMP-WHITESPACE-BEFORE-HEADERS", ("GET <get> HTTP/1.1\r\n \r\nHost: <host>\r\n\r\n",), REJECT)
    for name, host in (
        ("COMP-HOST-WITH-USERINFO", "user@<host>"),
        ("COMP-HOST-WITH-PATH", "<host>/path"),
        ("COMP-HOST-EMPTY-VALUE", ""),
        ("SMUG-MULTIPLE-HOST-COMMA", "<host>, other.example.com"),
    ):
        yield Case(name, (f"GET <get> HTTP/1.1\r\nHost: {host}\r\n\r\n",), REJECT)
    yield Case("COMP-EXPECT-UNKNOWN", (GET + "Expect: 200-ok\r\n\r\n",), rule("417", "2xx"))
    yield Case("COMP-DUPLICATE-CT", (POST + LENGTH + "Content-Type: text/html\r\n\r\n<body>",), rule("400, 415", "2xx"))
    yield Case("COMP-RANGE-POST", (POST + LENGTH + "Range: bytes=0-10\r\n\r\n<body>",), ACCEPT)
    yield Case("COMP-RANGE-INVALID", (GET + "Range: bytes=abc-xyz\r\n\r\n",), rule("2xx, 416"))
    yield Case("COMP-ACCEPT-NONSENSE", (GET + "Accept: application/x-nonsense\r\n\r\n",), rule("406, 2xx"))
    yield Case("MAL-CONTROL-CHARS-HEADER", (GET + "X-Test: abc\x07\x08\x0bdef\r\n\r\n",), REJECT)
    yield Case("MAL-NUL-IN-HEADER-VALUE", (GET + "X-Test: val\0ue\r\n\r\n",), REJECT)
    yield Case("MAL-NON-ASCII-HEADER-NAME", (GET + "X-T\xc3\xabst: value\r\n\r\n",), REJECT)
    yield Case("MAL-LONG-HEADER-VALUE", (f"{GET}X-Big: {'B' * LONG}\r\n\r\n",), TOO_LONG)
    yield Case("MAL-LONG-HEADER-NAME", (f"{GET}{'A' * LONG}: val\r\n\r\n",), TOO_LONG)
    yield Case("MAL-MANY-HEADERS", (GET + "".join(f"X-H-{i}: value\r\n" for i in range(10_000)) + END,), TOO_LONG)
    yield Case(
        "MAL-RANGE-OVERLAPPING", (GET + "Range: bytes=" + ",".join(["0-"] * 1000) + "\r\n\r\n",), rule("2xx, 400, 416")
    )
    yield Case("COOK-OVERSIZED", (f"{GET}Cookie: big={'c' * 2**16}\r\n\r\n",), rule("400, 431, 2xx"))
    yield Case("COOK-EMPTY", (GET + "Cookie: \r\n\r\n",), EITHER)
    yield Case("COOK-NUL", (GET + "Cookie: foo=\0bar\r\n\r\n",), REJECT_400)
    yield Case("COOK-CONTROL-CHARS", (GET + "Cookie: foo=\x01\x02\x03\r\n\r\n",), PREFER_400)
    yield Case(
        "COOK-MANY-PAIRS",
        (GET + "Cookie: " + "; ".join(f"c{i}=v" for i in range(1000)) + "\r\n\r\n",),
        rule("2xx, 400, 431"),
    )
    yield Case("COOK-MALFORMED", (GET + "Cookie: ===;;;\r\n\r\n",), EITHER)
    yield Case("COOK-MULTI-HEADER", (GET + "Cookie: a=1\r\nCookie: b=2\r\n\r\n",), ACCEPT)


def _semantics() -> Iterator[Case]:
    yield Case("COMP-POST-CL-BODY", (POST + LENGTH + END + "<body>",), ACCEPT)
    yield Case("COMP-POST-CL-ZERO", ("POST <empty> HTTP/1.1\r\nHost: <host>\r\nContent-Length: 0\r\n\r\n",), ACCEPT)
    # 411 is what this service's contract says of a body that has no length.
    yield Case("COMP-POST-NO-CL-NO-TE", ("POST <empty> HTTP/1.1\r\nHost: <host>\r\n\r\n",), rule("2xx, 411"))
    yield Case("COMP-POST-CL-UNDERSEND", (POST + "Content-Length: <n+5>\r\n\r\n<body>",), UNFINISHED)
    yield Case("COMP-GET-WITH-CL-BODY", (GET + LENGTH + END + "<body>",), EITHER)
    yield Case(
        "COMP-UPGRADE-POST",
        (POST + LENGTH + "Connection: Upgrade\r\nUpgrade: websocket\r\n" + SOCKET + END + "<body>",),
        NOT_SWITCHED,
    )
    yield Case("COMP-UPGRADE-MISSING-CONN", (GET + "Upgrade: websocket\r\n" + SOCKET + END,), NOT_SWITCHED)
    yield Case(
        "COMP-UPGRADE-UNKNOWN", (GET + "Connection: Upgrade\r\nUpgrade: totally-made-up/1.0\r\n\r\n",), NOT_SWITCHED
    )
    yield Case(
        "COMP-UPGRADE-INVALID-VER",
        (GET + "Connection: Upgrade\r\nUpgrade: websocket\r\n" + SOCKET.replace("13", "99") + END,),
        NOT_SWITCHED,
    )
    yield Case(
        "COMP-UPGRADE-HTTP10",
        (
            FOLLOWS.replace("1.1", "1.0").removesuffix(END)
            + "Connection: Upgrade\r\nUpgrade: websocket\r\n"
            + SOCKET
            + END,
        ),
        NOT_SWITCHED,
    )
    yield Case("COMP-CONNECTION-CLOSE", (GET + "Connection: close\r\n\r\n",), rule("2xx close"))
    yield Case("COMP-HTTP10-DEFAULT-CLOSE", ("GET <get> HTTP/1.0\r\nHost: <host>\r\n\r\n",), rule("2xx close"))
    yield Case("COMP-HTTP10-NO-HOST", ("GET <get> HTTP/1.0\r\n\r\n",), EITHER)
    yield Case(
        "COMP-TRACE-WITH-BODY",
        ("TRACE <get> HTTP/1.1\r\nHost: <host>\r\n" + LENGTH + END + "<body>",),
        rule("400, 405, 501", "2xx"),
    )
    yield Case(
        "COMP-TRACE-SENSITIVE",
        ("TRACE <get> HTTP/1.1\r\nHost: <host>\r\nAuthorization: Bearer secret-123\r\n\r\n",),
        rule("405, 501, 2xx"),
        lambda answer: b"secret-123" not in answer.body,
    )
    yield Case("COMP-HEAD-NO-BODY", (FOLLOWS.replace("GET", "HEAD"),), ACCEPT, lambda answer: not answer.body)
    yield Case(
        "COMP-405-ALLOW",
        ("DELETE <get> HTTP/1.1\r\nHost: <host>\r\n\r\n",),
        rule("405"),
        lambda answer: "allow" in answer.headers,
    )
    yield Case("COMP-DATE-HEADER", (FOLLOWS,), ACCEPT, lambda answer: "date" in answer.headers)
    yield Case("COMP-DATE-FORMAT", (FOLLOWS,), ACCEPT, lambda answer: answer.headers.get("date", "").endswith(" GMT"))
    yield Case(
        "COMP-NO-1XX-HTTP10",
        (POST.replace("1.1", "1.0") + LENGTH + "Expect: 100-continue\r\n\r\n<body>",),
        rule("2xx, 4xx"),
    )
    yield Case(
        "COMP-NO-CL-IN-204",
        ("OPTIONS <get> HTTP/1.1\r\nHost: <host>\r\n\r\n",),
        rule("2xx, 405"),
        lambda answer: answer.status != 204 or "content-length" not in answer.headers,
    )
    yield Case(
        "COMP-OPTIONS-ALLOW",
        ("OPTIONS <get> HTTP/1.1\r\nHost: <host>\r\n\r\n",),
        rule("2xx, 405"),
        lambda answer: "allow" in answer.headers,
    )
    yield Case("COMP-CONTENT-TYPE", (FOLLOWS,), ACCEPT, lambda answer: "content-type" in answer.headers)
    yield Case(
        "COMP-POST-UNSUPPORTED-CT", (POST.replace("json", "x-nonsense") + LENGTH + END + "<body>",), rule("415, 2xx")
    )


def _chunks() -> Iterator[Case]:
    begin = POST + CHUNKED + END
    yield Case("COMP-CHUNKED-BODY", (begin + CHUNKS,), ACCEPT)
    yield Case("COMP-CHUNKED-MULTI", (begin + "5\r\n<body:5>\r\n<x-5>\r\n<body5:>\r\n0\r\n\r\n",), ACCEPT)
    yield Case(
        "COMP-CHUNKED-EMPTY", ("POST <empty> HTTP/1.1\r\nHost: <host>\r\n" + CHUNKED + END + "0\r\n\r\n",), ACCEPT
    )
    yield Case("COMP-CHUNKED-NO-FINAL", (begin + "<x>\r\n<body>\r\n",), UNFINISHED)
    yield Case("COMP-CHUNKED-EXTENSION", (begin + "<x>;ext=value\r\n<body>\r\n0\r\n\r\n",), rule("2xx", "400"))
    yield Case("COMP-CHUNKED-TRAILER-VALID", (begin + "<x>\r\n<body>\r\n0\r\nX-Checksum: abc\r\n\r\n",), ACCEPT)
    yield Case("COMP-CHUNKED-HEX-UPPERCASE", (begin + "A\r\n<body> \r\n0\r\n\r\n",), ACCEPT)
    for name, size in (
        ("SMUG-CHUNK-BARE-SEMICOLON", "<x>;"),
        ("SMUG-CHUNK-EXT-INVALID-TOKEN", "<x>;bad[=x"),
        ("SMUG-CHUNK-UNDERSCORE", "0_<x>"),
        ("SMUG-CHUNK-HEX-PREFIX", "0x<x>"),
        ("SMUG-CHUNK-SIZE-PLUS", "+<x>"),
        ("SMUG-CHUNK-SIZE-TRAILING-OWS", "<x> "),
        ("SMUG-CHUNK-LEADING-SP", " <x>"),
        ("SMUG-CHUNK-EXT-CTRL", "<x>;\0ext"),
        ("SMUG-CHUNK-EXT-CR", "<x>;a\rX"),
        ("SMUG-CHUNK-NEGATIVE", "-1"),
        ("MAL-CHUNK-SIZE-OVERFLOW", "FFFFFFFFFFFFFFFF0"),
    ):
        yield Case(name, (f"{begin}{size}\r\n<body>\r\n0\r\n\r\n",), REJECT)
    yield Case("SMUG-CHUNK-BARE-CR-TERM", (begin + "<x>\r<body>\r\n0\r\n\r\n",), REJECT)
    yield Case("SMUG-CHUNK-MISSING-TRAILING-CRLF", (begin + "<x>\r\n<body>0\r\n\r\n",), REJECT)
    yield Case("SMUG-CHUNK-SPILL", (begin + "<x>\r\n<body>!!\r\n0\r\n\r\n",), REJECT)
    yield Case("SMUG-CHUNK-EXT-LF", (begin + "<x>;\n<body>\r\n0\r\n\r\n",), PREFER_400)
    yield Case("SMUG-CHUNK-LF-TERM", (begin + "<x>\r\n<body>\n0\r\n\r\n",), PREFER_400)
    yield Case("SMUG-CHUNK-LF-TRAILER", (begin + "<x>\r\n<body>\r\n0\r\n\n",), PREFER_400)
    yield Case(
        "MAL-CHUNK-EXT-64K",
        (f"{begin}<x>;ext={'a' * 2**16}\r\n<body>\r\n0\r\n\r\n",),
        rule("400, 413, 431, close", "2xx"),
    )
    for name, trailer in (
        ("SMUG-TRAILER-CL", "Content-Length: 50"),
        ("SMUG-TRAILER-TE", "Transfer-Encoding: chunked"),
        ("SMUG-TRAILER-HOST", "Host: evil.example.com"),
        ("SMUG-TRAILER-AUTH", "Authorization: Bearer evil"),
        ("SMUG-TRAILER-CONTENT-TYPE", "Content-Type: text/evil"),
    ):
        yield Case(name, (f"{begin}<x>\r\n<body>\r\n0\r\n{trailer}\r\n\r\n",), EITHER)
    yield Case("SMUG-BARE-CR-HEADER-VALUE", (POST + LENGTH + "X-Test: val\rue\r\n\r\n<body>",), REJECT)
    yield Case("SMUG-CHUNK-INVALID-SIZE-DESYNC", (begin + "+0\r\n\r\nX", FOLLOWS), REJECT)


def _lengths() -> Iterator[Case]:
    for name, value in (
        ("RFC9112-6.1-CL-NON-NUMERIC", "abc"),
        ("RFC9112-6.1-CL-PLUS-SIGN", "+<n>"),
        ("MAL-CL-OVERFLOW", "99999999999999999999"),
        ("MAL-CL-EMPTY", ""),
        ("SMUG-CL-NEGATIVE", "-1"),
        ("SMUG-CL-COMMA-DIFFERENT", "<n>, 10"),
        ("SMUG-CL-OCTAL", "0o<n>"),
        ("SMUG-CL-HEX-PREFIX", "0x<n>"),
        ("SMUG-CL-INTERNAL-SPACE", "1 0"),
        ("SMUG-CL-UNDERSCORE", "1_0"),
        ("SMUG-CL-NEGATIVE-ZERO", "-0"),
    ):
        yield Case(name, (f"{POST}Content-Length: {value}\r\n\r\n<body>",), REJECT)
    yield Case("SMUG-DUPLICATE-CL", (POST + LENGTH + "Content-Length: <n+5>\r\n\r\n<body>12345",), REJECT)
    for name, line in (
        ("MAL-CL-TAB-BEFORE-VALUE", "Content-Length:\t<n>"),
        ("SMUG-CL-TRAILING-SPACE", "Content-Length: <n> "),
        ("SMUG-CL-EXTRA-LEADING-SP", "Content-Length:  <n>"),
    ):
        yield Case(name, (f"{POST}{line}\r\n\r\n<body>",), EITHER)
    yield Case("SMUG-CL-LEADING-ZEROS", (POST + "Content-Length: 00<n>\r\n\r\n<body>",), PREFER_400)
    yield Case(
        "SMUG-CL-DOUBLE-ZERO", ("POST <empty> HTTP/1.1\r\nHost: <host>\r\nContent-Length: 00\r\n\r\n",), PREFER_400
    )
    yield Case("SMUG-CL-LEADING-ZEROS-OCTAL", (POST + "Content-Length: 0200\r\n\r\n<body>" + " " * 191,), PREFER_400)
    for name, value in (("SMUG-CL-COMMA-SAME", "<n>, <n>"), ("SMUG-CL-COMMA-TRIPLE", "<n>, <n>, <n>")):
        yield Case(name, (f"{POST}Content-Length: {value}\r\n\r\n<body>",), PREFER_400)
    yield Case(
        "MAL-POST-CL-HUGE-NO-BODY", (POST + "Content-Length: 999999999\r\n\r\n",), rule("400, 413, 429, close, wait")
    )
    yield Case(
        "SMUG-HEAD-CL-BODY", ("HEAD <get> HTTP/1.1\r\nHost: <host>\r\n" + LENGTH + END + "<body>",), EITHER, then=ACCEPT
    )
    yield Case(
        "SMUG-OPTIONS-CL-BODY",
        ("OPTIONS <get> HTTP/1.1\r\nHost: <host>\r\n" + LENGTH + END + "<body>",),
        rule("400, 405, 2xx"),
    )
    yield Case("SMUG-EXPECT-100-CL", (POST + LENGTH + "Expect: 100-continue\r\n\r\n<body>",), EITHER)
    for name, line in (
        ("NORM-UNDERSCORE-CL", "Content_Length: 99"),
        ("NORM-UNDERSCORE-TE", "Transfer_Encoding: chunked"),
        ("SMUG-TRANSFER_ENCODING", "Transfer_Encoding: chunked"),
    ):
        yield Case(name, (f"{POST}{LENGTH}{line}\r\n\r\n<body>", FOLLOWS), EITHER, then=ACCEPT)
    for name, line in (("NORM-SP-BEFORE-COLON-CL", "Content-Length : 5"), ("NORM-TAB-IN-NAME", "Content\tLength: 99")):
        yield Case(name, (f"{POST}{LENGTH}{line}\r\n\r\n<body>",), REJECT)
    yield Case("NORM-CASE-TE", (POST + LENGTH + "TRANSFER-ENCODING: chunked\r\n\r\n<body>",), REJECT)


def _codings() -> Iterator[Case]:
    for name, line, wanted in (
        ("SMUG-TE-XCHUNKED", "Transfer-Encoding: xchunked", CODING),
        ("SMUG-TE-IDENTITY", "Transfer-Encoding: identity", CODING),
        ("SMUG-TE-TRAILING-SPACE", "Transfer-Encoding: chunked ", AMBIGUOUS),
        ("SMUG-TE-SP-BEFORE-COLON", "Transfer-Encoding : chunked", REJECT),
        ("SMUG-TE-DOUBLE-CHUNKED", "Transfer-Encoding: chunked, chunked", CODING),
        ("SMUG-TE-CASE-MISMATCH", "Transfer-Encoding: Chunked", AMBIGUOUS),
        ("SMUG-TE-EMPTY-VALUE", "Transfer-Encoding: ", REJECT),
        ("SMUG-TE-LEADING-COMMA", "Transfer-Encoding: , chunked", AMBIGUOUS),
        ("SMUG-TE-TRAILING-COMMA", "Transfer-Encoding: chunked,", AMBIGUOUS),
        ("SMUG-TE-DUPLICATE-HEADERS", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", CODING),
        ("SMUG-TE-VTAB", "Transfer-Encoding: \x0bchunked", REJECT),
        ("SMUG-TE-FORMFEED", "Transfer-Encoding: \x0cchunked", REJECT),
        ("SMUG-TE-NULL", "Transfer-Encoding: chunked\0", REJECT),
        ("SMUG-TE-TAB-BEFORE-VALUE", "Transfer-Encoding:\tchunked", AMBIGUOUS),
        ("SMUG-TE-OBS-FOLD", "Transfer-Encoding:\r\n chunked", AMBIGUOUS),
        ("SMUG-CHUNKED-WITH-PARAMS", "Transfer-Encoding: chunked;ext=val", CODING),
    ):
        yield Case(name, (f"{POST}{line}\r\n{LENGTH}\r\n<body>",), wanted)
    yield Case("COMP-UNKNOWN-TE-501", (POST + "Transfer-Encoding: gzip\r\n\r\n",), CODING)
    yield Case("SMUG-TE-NOT-FINAL-CHUNKED", (POST + "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",), REJECT)
    yield Case("SMUG-TE-HTTP10", (POST.replace("1.1", "1.0") + CHUNKED + LENGTH + END + "<body>",), REJECT)
    # Not among Http11Probe's: a coding before `chunked` that nobody undoes (RFC 9112, section 6.1).
    yield Case("OWN-TE-GZIP-CHUNKED", (POST + "Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,), CODING)
    yield Case("OWN-TE-HTTP10-ALONE", (POST.replace("1.1", "1.0") + CHUNKED + END + CHUNKS,), REJECT)


def _desyncs() -> Iterator[Case]:
    both = CHUNKED + "Content-Length: "
    yield Case("SMUG-CL-TE-BOTH", (POST + both + "<chunks>\r\n\r\n" + CHUNKS,), AMBIGUOUS)
    yield Case("SMUG-CLTE-PIPELINE", (POST + "Content-Length: 4\r\n" + CHUNKED + "\r\n0\r\n\r\n",), AMBIGUOUS)
    yield Case("SMUG-TECL-PIPELINE", (POST + both + "30\r\n\r\n0\r\n\r\n",), AMBIGUOUS)
    yield Case("SMUG-CLTE-CONN-CLOSE", (POST + "Content-Length: 5\r\n" + CHUNKED + "\r\n0\r\n\r\n", FOLLOWS), SMUGGLED)
    yield Case("SMUG-TECL-CONN-CLOSE", (POST + both + "5\r\n\r\n0\r\n\r\n", FOLLOWS), SMUGGLED)
    yield Case("SMUG-CLTE-DESYNC", (POST + "Content-Length: 6\r\n" + CHUNKED + "\r\n0\r\n\r\nX", FOLLOWS), SMUGGLED)
    yield Case("SMUG-TECL-DESYNC", (POST + both + "30\r\n\r\n0\r\n\r\nX", FOLLOWS), SMUGGLED)
    yield Case(
        "SMUG-OPTIONS-TE-OBS-FOLD",
        (
            "OPTIONS <get> HTTP/1.1\r\nHost: <host>\r\nTransfer-Encoding:\r\n chunked\r\nContent-Length: 5\r\n\r\nhello",
            FOLLOWS,
        ),
        SMUGGLED,
    )
    get = "0\r\n\r\n" + FOLLOWS
    for name, body, lines in (
        ("SMUG-CLTE-SMUGGLED-GET", get, "Content-Length: <len>\r\nTransfer-Encoding: chunked"),
        ("SMUG-CLTE-SMUGGLED-GET-CL-PLUS", get, "Content-Length: +<len>\r\nTransfer-Encoding: chunked"),
        ("SMUG-CLTE-SMUGGLED-GET-CL-NON-NUMERIC", get, "Content-Length: <len>x\r\nTransfer-Encoding: chunked"),
        ("SMUG-CLTE-SMUGGLED-GET-TE-OBS-FOLD", get, "Transfer-Encoding:\r\n chunked\r\nContent-Length: <len>"),
        ("SMUG-CLTE-SMUGGLED-HEAD", get.replace("GET", "HEAD"), "Content-Length: <len>\r\nTransfer-Encoding: chunked"),
        ("SMUG-CLTE-SMUGGLED-GET-TE-TRAILING-SPACE", get, "Content-Length: <len>\r\nTransfer-Encoding: chunked "),
        ("SMUG-CLTE-SMUGGLED-GET-TE-LEADING-COMMA", get, "Content-Length: <len>\r\nTransfer-Encoding: , chunked"),
        ("SMUG-CLTE-SMUGGLED-GET-TE-CASE-MISMATCH", get, "Content-Length: <len>\r\nTransfer-Encoding: Chunked"),
        (
            "SMUG-TE-DUPLICATE-HEADERS-SMUGGLED-GET",
            get,
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: <len>",
        ),
        ("SMUG-DUPLICATE-CL-SMUGGLED-GET", "PING" + FOLLOWS, "Content-Length: 4\r\nContent-Length: <len>"),
    ):
        yield Case(name, (f"{POST}{lines}\r\n\r\n<inner>{body}",), ONE_ANSWER)
    yield Case(
        "SMUG-TECL-SMUGGLED-GET",
        (POST + both + "4\r\n\r\n<inner>40\r\n" + GET + "Content-Length: 7\r\n\r\n\r\n0\r\n\r\n",),
        ONE_ANSWER,
    )
    yield Case(
        "SMUG-GET-CL-PREFIX-DESYNC",
        (GET + "Content-Length: <len>\r\n\r\n<inner>" + GET, END + FOLLOWS),
        EITHER,
        then=rule("2xx, 400"),
    )
    yield Case(
        "SMUG-CL0-BODY-POISON",
        ("POST <empty> HTTP/1.1\r\nHost: <host>\r\nContent-Length: 0\r\n\r\nX", FOLLOWS),
        EITHER,
        then=rule("400, 405, 501, close"),
    )
    yield Case("SMUG-GET-CL-BODY-DESYNC", (GET + "Content-Length: 5\r\n\r\nhello", FOLLOWS), EITHER, then=ACCEPT)
    yield Case(
        "SMUG-OPTIONS-CL-BODY-DESYNC",
        ("OPTIONS <get> HTTP/1.1\r\nHost: <host>\r\nContent-Length: 5\r\n\r\nhello", FOLLOWS),
        rule("400, 405, 2xx"),
        then=ACCEPT,
    )
    yield Case(
        "SMUG-EXPECT-100-CL-DESYNC",
        (POST + LENGTH + "Expect: 100-continue\r\n\r\n<body>", FOLLOWS),
        rule("400, 417, 2xx"),
        then=ACCEPT,
    )
    yield Case("SMUG-PIPELINE-SAFE", (FOLLOWS, FOLLOWS), ACCEPT, then=ACCEPT)


def _not_injected(answer: Answer) -> bool:
    return "x-injected" not in answer.headers


CASES: dict[str, Case] = {
    case.name: case
    for group in (_start_line, _headers, _semantics, _chunks, _lengths, _codings, _desyncs)
    for case in group()
}


@dataclass(frozen=True)
class Target:
    """Where the placeholders of a case lead on one server.

    Attributes:
        host: Its `host:port`.
        get: Target that GET answers with 200.
        post: Target that takes `body`.
        body: JSON that `post` answers with 200.
        empty: Target that POST without a body answers with 200.
    """

    host: str
    get: str
    post: str
    empty: str
    body: str = '{"x":[0]}'

    def fill(self, text: str) -> bytes:
        """The bytes of what a case sends."""
        body = self.body
        head, _mark, inner = text.partition("<inner>")
        for name, value in (
            ("<get>", self.get), ("<post>", self.post), ("<empty>", self.empty), ("<host>", self.host), ("<body>", body),
            ("<body:5>", body[:5]), ("<body5:>", body[5:]), ("<n>", str(len(body))), ("<n+5>", str(len(body) + 5)),
            ("<x>", f"{len(body):x}"), ("<x-5>", f"{len(body) - 5:x}"), ("<chunks>", str(len(body) + 10)),
        ):  # fmt: skip
            head, inner = head.replace(name, value), inner.replace(name, value)
        return (head.replace("<len>", str(len(inner))) + inner).encode("latin-1")
