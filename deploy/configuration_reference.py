"""Writes docs/configuration.md from `Settings`: `python -m deploy.configuration_reference`, and `--check` for CI.

Owns that page's text. Names and defaults are those of `tilewire serve --help`. Starts nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from tilewire.service.cli.serve import default_text, variable_name
from tilewire.service.config.settings import Settings, flag_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

EXIT_DIFFERS = 1
EXIT_USAGE = 2

INTRODUCTION = """\
<!-- Written by `make docs` from service/config/settings.py. Do not edit. -->
# Configuration

Every setting of `tilewire serve` is a flag and an environment variable; the flag wins. There is no configuration file. A
value that cannot be right ends the command with status 2 and a line that names the flag.

Sizes are plain bytes or carry a unit: `67108864`, `64MiB`, `2GB`. Booleans are `true` or `false` as variables;
as flags, `--access-log` and `--no-access-log`.

```sh
TILEWIRE_PORT=9000 TILEWIRE_DEVICE=cpu make serve
tilewire serve --port 9000 --device cpu
```

| flag | variable | default | meaning |
|---|---|---|---|
"""


def main(arguments: list[str], path: Path = PAGE) -> int:
    """Prints the page, or compares it with the one at `path`; returns the exit status."""
    if arguments == ["--check"]:
        if path.is_file() and path.read_text(encoding="utf-8") == page():
            return 0
        sys.stderr.write("docs/configuration.md is out of date: run `make docs`\n")
        return EXIT_DIFFERS
    if arguments:
        sys.stderr.write("usage: python -m deploy.configuration_reference [--check]\n")
        return EXIT_USAGE
    sys.stdout.write(page())
    return 0


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_row(name, field) for name, field in Settings.model_fields.items())


def _row(name: str, field: FieldInfo) -> str:
    default = "none" if field.default is None else f"`{default_text(name, field)}`"
    return f"| `{flag_name(name)}` | `{variable_name(name)}` | {default} | {field.description} |\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
