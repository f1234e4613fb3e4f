"""Which checkpoints and models belong to which run, and what they look like now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from monitor.facts import CheckpointFacts
from monitor.probes.room import RunPlace
from monitor.verl_config import Value

_MODEL_KEYS = ("actor_rollout_ref.model.path",)
_WEIGHTS = ("*.safetensors", "*.bin")


class CheckpointWatch:
    """Looks at the directories of runs. Blocking; a file system that hangs hangs this alone.

    Args:
        directory: where checkpoints are, given by the user: the job's working directory or the checkpoint directory.
    """

    def __init__(self, clock: Callable[[], float], directory: str | None = None) -> None:
        self._clock, self._directory = clock, directory

    def look(self, places: Mapping[str, RunPlace]) -> tuple[Mapping[str, CheckpointFacts], Mapping[str, int]]:
        """Checkpoints and model sizes, by run."""
        checkpoints, sizes = {}, {}
        for run, place in places.items():
            seen = self._checkpoints(place)
            if seen is not None:
                checkpoints[run] = seen
            if size := model_bytes(place.config):
                sizes[run] = size
        return checkpoints, sizes

    def _checkpoints(self, place: RunPlace) -> CheckpointFacts | None:
        return None


def model_bytes(config: Mapping[str, Value]) -> int:
    """Size of the weights of the run's model, where its directory can be seen; 0 where not."""
    for key in _MODEL_KEYS:
        value = config.get(key)
        if not isinstance(value, str) or not value:
            continue
        try:
            folder = Path(value)
            for pattern in _WEIGHTS:
                if size := sum(path.stat().st_size for path in folder.glob(pattern)):
                    return size
        except OSError:
            continue
    return 0
