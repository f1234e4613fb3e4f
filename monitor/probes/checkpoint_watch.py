"""Which checkpoints and models belong to which run, and what they look like now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from monitor.facts import CheckpointFacts
from monitor.probes.checkpoints import expectation, find, look
from monitor.probes.room import RunPlace
from monitor.verl_config import Value

_WEIGHTS = ("*.safetensors", "*.bin")


class CheckpointWatch:
    """Looks at the directories of runs. Blocking; a file system that hangs hangs this alone.

    Args:
        clock: the engine's.
        directory: where checkpoints are, given by the user: the job's working directory or the checkpoint directory.
    """

    def __init__(self, clock: Callable[[], float], directory: str | None = None) -> None:
        self._clock, self._directory = clock, directory
        self._found: dict[str, Path] = {}

    def look(self, places: Mapping[str, RunPlace]) -> tuple[Mapping[str, CheckpointFacts], Mapping[str, int]]:
        """Checkpoints and model sizes, by run."""
        checkpoints, sizes = {}, {}
        self._found = {run: path for run, path in self._found.items() if run in places}
        for run, place in places.items():
            directory = self._found.get(run) or find(place.config, place.logs, self._directory)
            if directory is not None:
                if directory.exists():
                    self._found[run] = directory  # it stays this one, also when its tracker goes
                checkpoints[run] = look(directory, self._clock(), expectation(place.config))
            if size := model_bytes(place.config):
                sizes[run] = size
        return checkpoints, sizes


def model_bytes(config: Mapping[str, Value]) -> int:
    """Size of the weights of the run's model, where its directory can be seen; 0 where not."""
    value = config.get("actor_rollout_ref.model.path")
    if not isinstance(value, str) or not value:
        return 0
    try:
        for pattern in _WEIGHTS:
            if size := sum(path.stat().st_size for path in Path(value).glob(pattern)):
                return size
    except OSError:
        pass
    return 0
