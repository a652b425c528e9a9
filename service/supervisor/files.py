"""Opens the files of `--tensors-dir` and `--programs-dir` for all engines, once: each reads the same, whenever it starts."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from tilewire.service.config.settings import Settings
from tilewire.service.supervisor.handover import OpenFile
from tilewire.service.supervisor.listeners import StartError


def open_files(settings: Settings, stack: contextlib.ExitStack) -> tuple[OpenFile, ...]:
    """Opens the files of both folders, sorted by name; `stack` closes them.

    Raises:
        StartError: A folder or a file cannot be read, or is none.
    """
    files = []
    for folder, setting, suffix in (
        (settings.tensors_dir, "--tensors-dir", ".safetensors"),
        (settings.programs_dir, "--programs-dir", ".json"),
    ):
        try:
            paths = [] if folder is None else sorted(path for path in folder.iterdir() if path.suffix == suffix)
        except OSError as error:
            raise StartError(f"{setting}: {folder}: {error.strerror}") from error
        for path in paths:
            file = open_file(path, setting)
            stack.callback(os.close, file.fd)
            files.append(file)
    return tuple(files)


def open_file(path: Path, setting: str) -> OpenFile:
    """Opens a file of the folder that a setting names; the descriptor is the caller's.

    Raises:
        StartError: It cannot be read, or is no regular file.
    """
    try:
        # Opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(f"{setting}: {path.name!r}: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise StartError(f"{setting}: {path.name!r} is not a regular file")
    # The time of the inode: that of the content can be set, and is the same in every copy by `cp -p`.
    return OpenFile(setting, path.name, fd, found.st_ctime, found.st_size, found.st_mtime_ns)
