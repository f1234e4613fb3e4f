"""``python -m monitor.attach --hook-path`` prints the directory to put on PYTHONPATH for versions without plugins."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m monitor.attach", description="Attach the monitor to verl.")
    parser.add_argument("--hook-path", action="store_true", required=True,
                        help="print the directory of a sitecustomize.py to put on PYTHONPATH")
    parser.parse_args()
    sys.stdout.write(f"{Path(__file__).resolve().parent / 'hook'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
