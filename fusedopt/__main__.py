"""``python -m fusedopt info``: what was found and what is chosen, to be pasted into a bug report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fusedopt import backends
from fusedopt.config import MainGradConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedopt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="which libraries were found, and which of them does what")
    info.add_argument("--backend", default=MainGradConfig.from_env().backend, help="as MainGradConfig.backend")
    args = parser.parse_args(argv)
    try:
        print(backends.report(MainGradConfig.from_dict({"backend": args.backend}).backend))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
