"""Finds the logs below a directory, in portions, so that a large tree holds nothing up."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator

Found = dict[str, tuple[bool, os.stat_result]]
"""Path -> is a symbolic link, status."""

_WALK_DEPTH = 12
_WANDB_RUN = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-\w+")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def walk(
    root: str, patterns: tuple[str, ...], failed: Callable[[str, OSError], None]
) -> Iterator[tuple[str, bool, os.stat_result] | None]:
    """Logs below a directory, with None for every other entry, so that the caller can do it in portions.

    Hidden entries are left out: file systems keep snapshots, and copiers unfinished files, under such names.

    Raises:
        OSError: the root itself cannot be listed. Trouble further down is told to ``failed``.
    """
    pending, seen = [(root, 0)], set()
    while pending:
        directory, depth = pending.pop()
        try:
            with os.scandir(directory) as entries:
                listing = list(entries)
        except OSError as error:
            if directory == root:
                raise
            failed(directory, error)
            continue
        for entry in listing:
            found = None
            if not entry.name.startswith("."):
                try:
                    if entry.is_dir():
                        if _WANDB_RUN.fullmatch(os.path.basename(directory)) or (
                                entry.name == "latest-run" and entry.is_symlink()):
                            continue  # W&B's copy of the console, and a second way to a run's folder
                        status = entry.stat()
                        if depth < _WALK_DEPTH and (status.st_dev, status.st_ino) not in seen:
                            seen.add((status.st_dev, status.st_ino))
                            pending.append((entry.path, depth + 1))
                    elif _wanted(entry.name, patterns):
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            found = (entry.path, entry.is_symlink(), status)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    failed(entry.path, error)
            yield found


def _wanted(name: str, patterns: tuple[str, ...]) -> bool:
    return not name.endswith(_PACKED) and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
