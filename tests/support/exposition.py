"""Reads `/metrics`: sums of samples by name and labels."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]
Scrape = dict[Series, float]

SETTLE_S = 10.0
POLL_S = 0.02


def scrape(client: httpx.Client) -> Scrape:
    """All samples."""
    response = client.get("/metrics", headers={"accept": "text/plain"})
    assert response.status_code == 200
    lines = (line.rpartition(" ") for line in response.text.splitlines() if not line.startswith("#"))
    return {_series_of(series): float(value) for series, _, value in lines}


@functools.cache
def _series_of(text: str) -> Series:
    """Name and labels; kept, since parsing the 2,000 series of each scrape took more time than making them."""
    ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{text} 0\n"))
    return sample.name, frozenset(sample.labels.items())


def total(samples: Scrape, name: str, **labels: str) -> float:
    """The sum over all samples of this name that have these labels."""
    wanted = set(labels.items())
    return sum(value for (sample, found), value in samples.items() if sample == name and wanted <= found)


def settles(client: httpx.Client, holds: Callable[[Scrape], bool]) -> bool:
    """Whether the figures come to this within a moment: what an answer's end sets, the client may see before it is set."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        if holds(scrape(client)):
            return True
        time.sleep(POLL_S)
    return False


def is_idle(samples: Scrape) -> bool:
    """Nothing is under way and no slot is held; the request that asks counts for nothing here."""
    used = total(samples, "tilewire_arena_bytes", state="used")
    return (
        used == 0 and total(samples, "tilewire_in_flight_requests") == 0 and total(samples, "tilewire_queue_depth") == 0
    )


def check_left_idle(client: httpx.Client) -> None:
    """Checks that a server answers, is ready, and holds nothing of the requests before."""
    assert client.get("/v2/health/live").status_code == 200
    assert client.get("/v2/health/ready").status_code == 200
    assert settles(client, is_idle), scrape(client)
