"""HTTP/1.1 as the standard says it: the cases of Http11Probe that apply, each on a connection of its own."""

from __future__ import annotations

import pytest

from tests.support.http11_cases import CASES, Target
from tests.support.http11_probe import FAILS, PASSES, WARNS, Observation, judge, play_all
from tests.support.live_server import LiveServer

# What the standard allows and we keep, and why.
KEPT = {
    "RFC9112-3-MULTI-SP-REQUEST-LINE": "the parser takes several spaces as one; no proxy is known to pass them on",
    "RFC9112-3.2-FRAGMENT-IN-TARGET": "a fragment is ignored, as browsers' own are",
    "SMUG-ABSOLUTE-URI-HOST-MISMATCH": "there is one host: the name decides nothing",
    "COMP-EXPECT-UNKNOWN": "an unknown expectation may be ignored (RFC 9110, section 10.1.1)",
    "COMP-DUPLICATE-CT": "the last content type counts",
    "MAL-CHUNK-EXT-64K": "an extension costs nothing but its bytes, which are dropped as they come",
    "SMUG-CL-LEADING-ZEROS": "1*DIGIT allows them, and they are read as decimal",
    "SMUG-CL-DOUBLE-ZERO": "see above",
    "SMUG-CL-LEADING-ZEROS-OCTAL": "see above",
}


# Defects that are known and open; each ends with its repair.
@pytest.fixture(scope="module")
def observations(server: LiveServer) -> dict[str, Observation]:
    target = Target(f"{server.host}:{server.port}", "/healthz", "/v1/softmax", "/v2/repository/index")
    return play_all(CASES.values(), (server.host, server.port), target)


@pytest.mark.parametrize("name", CASES)
def test_the_outcome_is_right(observations: dict[str, Observation], name: str) -> None:
    assert judge(CASES[name], observations[name]) == (WARNS if name in KEPT else PASSES), str(observations[name])


def test_the_judge_fails_what_is_wrong() -> None:
    """A server that answers nothing, and one that closes at once, do not pass."""
    silent = {name: judge(case, Observation()) for name, case in CASES.items()}
    assert sum(verdict == FAILS for verdict in silent.values()) > len(CASES) - 15
    closing = {name: judge(case, Observation(is_closed=True)) for name, case in CASES.items()}
    assert all(closing[name] == FAILS for name in ("COMP-BASELINE", "COMP-CHUNKED-BODY", "SMUG-PIPELINE-SAFE"))
