"""Writes the servers of `haproxy.cfg` from a list of hosts, and has a running HAProxy read it. Standard library only.

    python hosts.py haproxy.cfg /etc/haproxy/haproxy.cfg 1=10.0.0.1:8000 2=10.0.0.2:8000 --reload 4711

A host keeps its id for as long as it lives: the ring is made of the ids.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

MAX_ID = 2**19
MAX_PORT = 65535
EXIT_FAILED = 1
_SERVER = re.compile(r"^    server .*\n(?:    server .*\n)*", re.MULTILINE)
_ADDRESS = re.compile(r"[A-Za-z0-9.:\[\]-]+:(\d{1,5})", re.ASCII)
_ID = re.compile(r"\d{1,10}", re.ASCII)
_ADMIN = re.compile(r"^ *stats socket (\S+)", re.MULTILINE)
ADMIN_TIMEOUT_S = 2.0


def parse_hosts(texts: Iterable[str]) -> dict[int, str]:
    """Reads the hosts of the command line.

    Args:
        texts: `ID=HOST:PORT` of each.

    Returns:
        Address of each host by its id.

    Raises:
        ValueError: Not of this form, or an id that two have.
    """
    hosts: dict[int, str] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not equals or not _ID.fullmatch(name):
            raise ValueError(f"{text[:64]!r}: expected ID=HOST:PORT")
        server_id = int(name)
        if server_id in hosts:
            raise ValueError(f"id {server_id} is given twice: {hosts[server_id]} and {address[:64]}")
        hosts[server_id] = address
    return hosts


def render(template: str, hosts: Mapping[int, str]) -> str:
    """Puts these hosts in the place of the template's.

    Args:
        template: Text of `haproxy.cfg`.
        hosts: Address of each host, `name:port`, by its id.

    Raises:
        ValueError: A template without servers, an id out of range, or what is no address.
    """
    for server_id, address in hosts.items():
        if not 0 < server_id < MAX_ID:
            raise ValueError(f"id {server_id}: expected 1 to {MAX_ID - 1}")
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[1]) <= MAX_PORT:
            raise ValueError(f"host {server_id}: {address[:64]!r} is no address; expected name:port")
    hashed = [f"    server host-{number} {address} id {number}\n" for number, address in sorted(hosts.items())]
    other = [line.rstrip("\n") + f" track residents/{line.split()[1]}\n" for line in hashed]
    head, *rest = _SERVER.split(template)
    if len(rest) != 3:
        raise ValueError("the template has to hold the servers of three backends")
    return head + "".join(hashed) + rest[0] + "".join(other) + rest[1] + "".join(hashed) + rest[2]


def number(known: Mapping[str, int], addresses: Iterable[str]) -> dict[str, int]:
    """Gives each address an id: the one that it had, or else the smallest that nobody has.

    Args:
        known: Ids by address, of now or earlier.
        addresses: Addresses that live.

    Returns:
        Ids by address. An address that is gone gives its id, and its keys, to the next that comes.
    """
    alive = list(addresses)
    ids = {address: known[address] for address in alive if address in known}
    free = (number for number in range(1, MAX_ID) if number not in set(ids.values()))
    return ids | {address: next(free) for address in sorted(set(alive) - ids.keys())}


def listed(config: str) -> dict[int, str] | None:
    """Asks the running proxy for its hosts, over the stats socket that its configuration names.

    Args:
        config: Text of the configuration.

    Returns:
        Address of each host by its id, or None when there is no socket, or nobody answers.
    """
    found = _ADMIN.search(config)
    if found is None:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(ADMIN_TIMEOUT_S)
            client.connect(found[1])
            client.sendall(b"show servers state residents\n")
            lines = b"".join(iter(lambda: client.recv(65536), b"")).decode().splitlines()
    except OSError:
        return None
    # The first line is the version of the form, the second the names of its columns.
    names = lines[1].removeprefix("# ").split() if len(lines) > 1 else []
    rows = [dict(zip(names, line.split(), strict=False)) for line in lines[2:] if line]
    return {int(row["srv_id"]): _address(row) for row in rows}


def _address(row: Mapping[str, str]) -> str:
    name = row["srv_fqdn"] if row["srv_fqdn"] != "-" else row["srv_addr"]
    return f"[{name}]:{row['srv_port']}" if ":" in name else f"{name}:{row['srv_port']}"


def write(path: Path, text: str) -> bool:
    """Replaces a file at once; returns whether its text changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return True


def main(argv: list[str] | None = None) -> int:
    """Writes the configuration.

    Returns:
        The exit status: 1 when a file cannot be read or written, or HAProxy cannot be signalled.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("template", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("hosts", nargs="+", metavar="ID=HOST:PORT")
    parser.add_argument("--reload", type=int, metavar="PID", help="the master process of haproxy -W")
    arguments = parser.parse_args(argv)
    # Of 0 and of negative numbers whole groups of processes would be signalled.
    if arguments.reload is not None and arguments.reload < 1:
        parser.error(f"--reload: {arguments.reload} is no process id")
    try:
        text = render(arguments.template.read_text(encoding="utf-8"), parse_hosts(arguments.hosts))
        is_changed = write(arguments.out, text)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return EXIT_FAILED
    try:
        if is_changed and arguments.reload is not None:
            os.kill(arguments.reload, signal.SIGUSR2)
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"{parser.prog}: {arguments.out} is written, but --reload {arguments.reload}: {error}\n")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
