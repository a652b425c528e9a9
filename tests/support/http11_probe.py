"""Plays cases of HTTP/1.1 against a server and judges what came: passes, warns or fails."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.support.http11_cases import CLOSE, WAIT, Case, Rule, Target
from tests.support.raw_http import Answer, ConnectionEnded, RawConnection

PASSES, WARNS, FAILS = "passes", "warns", "fails"
# Longest wait for an answer or an end that a rule asks for, and for one that may not come.
TIMEOUT_S, SILENCE_S = 10.0, 0.7
CONTINUE = 100


@dataclass
class Observation:
    """What one server did with one case.

    Attributes:
        answers: Answers to what was sent first, those of 100 left out.
        is_closed: Whether the server closed behind them.
        then: Outcomes of what was sent second; empty when the connection was closed before, or nothing was to be sent.
    """

    answers: list[Answer] = field(default_factory=list)
    is_closed: bool = False
    then: frozenset[str] = frozenset()

    @property
    def outcomes(self) -> frozenset[str]:
        """Outcomes in the words of the rules."""
        return _outcomes(self.answers, self.is_closed)

    def __str__(self) -> str:
        words = [str(answer.status) for answer in self.answers] + [CLOSE if self.is_closed else "open"]
        return " ".join(words) + (f", then {'/'.join(sorted(self.then))}" if self.then else "")


def _outcomes(answers: list[Answer], is_closed: bool) -> frozenset[str]:
    if not answers:
        return frozenset({CLOSE if is_closed else WAIT})
    status = str(answers[0].status)
    end = CLOSE if is_closed else "open"
    names = (status, f"{status[0]}xx")
    return frozenset((*names, *(f"{name} {end}" for name in names)))


def play(case: Case, address: tuple[str, int], target: Target) -> Observation:
    """Sends a case over a connection of its own."""
    seen = Observation()
    is_head = case.sends[0].startswith("HEAD ")
    with RawConnection(socket.create_connection(address, timeout=TIMEOUT_S)) as connection:
        _send(connection, target.fill(case.sends[0]))
        asks_end = not any(one[:1].isdigit() and not one.endswith(CLOSE) for one in case.rule.passes)
        end_s = time.monotonic() + (SILENCE_S if WAIT in case.rule.passes else TIMEOUT_S)
        seen.is_closed = _read(connection, seen.answers, end_s, is_head=is_head, at_most=1)
        if seen.answers and not seen.is_closed:
            # What is not asked for is looked for a moment: an end, or an answer too many.
            end_s = time.monotonic() + (TIMEOUT_S if asks_end else SILENCE_S)
            if len(case.sends) == 1 or case.rule.max_answers == 1 or asks_end:
                seen.is_closed = _read(connection, seen.answers, end_s, is_head=is_head, at_most=2)
        if len(case.sends) > 1 and seen.answers and not seen.is_closed:
            _send(connection, target.fill(case.sends[1]))
            later: list[Answer] = []
            is_closed = _read(connection, later, time.monotonic() + TIMEOUT_S, is_head=False, at_most=1)
            seen.then = _outcomes(later, is_closed)
    return seen


def _send(connection: RawConnection, data: bytes) -> None:
    # A server may refuse and close before all of it is sent.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(data)


def _read(connection: RawConnection, answers: list[Answer], end_s: float, *, is_head: bool, at_most: int) -> bool:
    """Reads final answers until there are enough, the server closes (True), or the time is over."""
    while len(answers) < at_most:
        rest_s = end_s - time.monotonic()
        if rest_s <= 0:
            return False
        connection.sock.settimeout(rest_s)
        try:
            answer = connection.answer(is_head=is_head)
        except TimeoutError:
            return False
        except (ConnectionEnded, ConnectionResetError):
            return True
        if answer.status != CONTINUE:
            answers.append(answer)
    return False


def judge(case: Case, seen: Observation) -> str:
    """Whether what came passes, warns or fails."""
    verdict = _verdict(case.rule, seen.outcomes, len(seen.answers))
    if verdict == FAILS or (case.check is not None and seen.answers and not case.check(seen.answers[0])):
        return FAILS
    if case.then is not None and seen.then and _verdict(case.then, seen.then, 1) != PASSES:
        return FAILS
    return verdict


def _verdict(rule: Rule, outcomes: frozenset[str], num_answers: int) -> str:
    if num_answers > rule.max_answers:
        return FAILS
    if outcomes & rule.passes:
        return PASSES
    return WARNS if outcomes & rule.warns else FAILS


def play_all(cases: Iterable[Case], address: tuple[str, int], target: Target) -> dict[str, Observation]:
    """Plays cases, several at once: most of their time is waiting."""
    cases = list(cases)
    with ThreadPoolExecutor(16) as pool:
        return dict(
            zip((case.name for case in cases), pool.map(lambda case: play(case, address, target), cases), strict=True)
        )
