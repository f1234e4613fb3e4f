"""Which checkpoints and models belong to which run, and what they look like now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from monitor.facts import CheckpointFacts
from monitor.probes.checkpoints import expectation, find, look
from monitor.probes.room import RunPlace

_WEIGHTS = ("*.safetensors", "*.bin")
_SEARCHED_EVERY = 10
_MOST_MODELS = 500


class CheckpointWatch:
    """Looks at the directories of runs. Blocking; a file system that hangs hangs this alone.

    Args:
        clock: the engine's.
        directory: where checkpoints are, given by the user: the job's working directory or the checkpoint directory.
    """

    def __init__(self, clock: Callable[[], float], directory: str | None = None) -> None:
        self._clock, self._directory = clock, directory
        self._found: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}  # model path -> bytes
        self._looks = 0
        self._known: set[str] = set()  # runs whose directory was looked for

    def look(self, places: Mapping[str, RunPlace]) -> tuple[Mapping[str, CheckpointFacts], Mapping[str, int]]:
        """Checkpoints and model sizes, by run."""
        checkpoints, sizes = {}, {}
        self._looks += 1
        self._found = {run: path for run, path in self._found.items() if run in places}
        self._known &= places.keys()
        for run, place in places.items():
            directory = self._found.get(run)
            # A directory that was not found is looked for now and then only: of many runs, most have none here.
            if directory is None and (run not in self._known or self._looks % _SEARCHED_EVERY == 0):
                directory = find(place.config, place.logs, self._directory)
            if place.config or place.logs:
                self._known.add(run)
            if directory is not None:
                if directory.exists():
                    self._found[run] = directory  # it stays this one, also when its tracker goes
                checkpoints[run] = look(directory, self._clock(), expectation(place.config))
            path = place.config.get("actor_rollout_ref.model.path")
            if isinstance(path, str) and path not in self._sizes:
                self._sizes = {**dict(list(self._sizes.items())[-_MOST_MODELS:]), path: model_bytes(path)}
            if isinstance(path, str) and self._sizes[path]:
                sizes[run] = self._sizes[path]
        return checkpoints, sizes


def model_bytes(directory: str) -> int:
    """Size of a model's weights, where its directory can be seen; 0 where not."""
    if not directory:
        return 0
    try:
        for pattern in _WEIGHTS:
            if size := sum(path.stat().st_size for path in Path(directory).glob(pattern)):
                return size
    except OSError:
        pass
    return 0
