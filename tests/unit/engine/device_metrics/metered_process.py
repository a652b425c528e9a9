"""A process that shows a device which is not there: an engine's sampler over a meter whose readings are its arguments.

Run with PROMETHEUS_MULTIPROC_DIR set; ends when its standard input does. Owns nothing else.
"""

from __future__ import annotations

import sys

import msgspec

from tilewire.service.engine.device_metrics.contract import NoMeter, Reading
from tilewire.service.engine.device_metrics.sampler import Sampler

UUID = "GPU-8d1c3ad4-0a2e-4f57-9d43-0123456789ab"
PERIOD_S = 0.01


class ScriptedMeter:
    """Gives its readings one after the other, then the last one for ever. A reading of None is a failure."""

    uuid = UUID

    def __init__(self, readings: list[dict[str, float] | None]) -> None:
        self._readings = readings

    def read(self) -> Reading:
        """The next one."""
        reading = self._readings[0]
        if len(self._readings) > 1:
            del self._readings[0]
        else:
            print("shown", flush=True)
        if reading is None:
            raise NoMeter("the device fell off the bus")
        return Reading(**reading)  # type: ignore[arg-type]


def main() -> None:
    """Shows them until told to end."""
    readings = msgspec.json.decode(sys.argv[1], type=list[dict[str, float] | None])
    sampler = Sampler("cuda:3", ScriptedMeter(readings), PERIOD_S)
    sampler.start()
    sys.stdin.read()
    sampler.stop()


if __name__ == "__main__":
    main()
