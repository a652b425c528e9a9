"""Which member of the catalogue is best for sizes like these, as measured when a process started, kept on disk.

For devices without a table of their own. Names configurations and never adds any; `kernels.selection.tables.install_picks` has
dispatch consult them. Measuring is `kernels.autotune.starting`'s. Knows how picks are written, not when they are made.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewire.kernels.matmul.members import SPLITS, members
from tilewire.kernels.matmul.table import config_of
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import MAX_SPLITS

# By bucket: an entry, or None where what dispatch takes by itself was as good.
Picks = dict[str, dict[str, Any] | None]
_logger = logging.getLogger(__name__)


class PicksError(ValueError):
    """Not a file of picks for this device and these kernels; the message says why."""


def path_of(target: Target, folder: Path) -> Path:
    """The file of `target`'s picks."""
    return folder / f"tilewire-picks-{target.name}.json"


def read_picks(target: Target, folder: Path, identity: Mapping[str, str]) -> Picks:
    """The picks that `folder` has for `target`; none when it has no file.

    A file that is broken, was made under another identity, or names what is no member of the catalogue is ignored with
    a warning.

    Args:
        target: the device.
        folder: where `write_picks` put them.
        identity: what they depend on: device, driver, Triton, kernels.
    """
    path = path_of(target, folder)
    try:
        if not path.is_file():
            return {}
        return _checked(json.loads(path.read_bytes()), target, identity)
    except (OSError, ValueError) as error:
        _logger.warning("%s is ignored: %s", path, error)
        return {}


def _checked(found: Any, target: Target, identity: Mapping[str, str]) -> Picks:
    if not isinstance(found, dict) or found.get("identity") != dict(identity):
        raise PicksError("made by another device, driver, Triton or set of kernels")
    picks = found.get("picks")
    if not isinstance(picks, dict):
        raise PicksError("holds no picks")
    configs = {config for _, config in members(target)}
    for bucket, entry in picks.items():
        if entry is not None and not _is_sound(bucket, entry, configs):
            raise PicksError(f"{bucket}: not a member of the catalogue")
    return picks


def _is_sound(bucket: str, entry: Any, configs: set[Any]) -> bool:
    if not isinstance(entry, dict):
        return False
    if bucket.startswith("softmax "):
        splits = entry.get("splits")
        return isinstance(splits, int) and 1 <= splits <= MAX_SPLITS
    try:
        whole = config_of({**entry, "split_k": 1})
        return whole in configs and entry.get("split_k") in SPLITS
    except TypeError:
        return False


def write_picks(picks: Picks, target: Target, folder: Path, identity: Mapping[str, str]) -> None:
    """Keep `picks` in `folder`, whole or not at all.

    A folder that cannot be written to costs a warning, and the next start's time.

    Args:
        picks: by bucket.
        target: the device.
        folder: made when it is not there.
        identity: as in `read_picks`.
    """
    path = path_of(target, folder)
    text = json.dumps({"identity": dict(identity), "picks": picks}, indent=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")
    except OSError as error:
        _logger.warning("picks are not kept: %s", error)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that whoever reads `path` finds the old or the new, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
