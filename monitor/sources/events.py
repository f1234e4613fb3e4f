"""The events of one log: its records, and the starts and ends of the runs it tells of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monitor.model import Log, RawStep, RunConfig, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import clean_name
from monitor.sources.records import Config, End, Record, RecordReader, Row

_RUNS_PER_FILE = 4096  # run names remembered of a file whose rows name their runs
_FOREIGN_LINES = 3  # lines without a row of its own after which an announced run is taken back

Names = tuple[str, str]
"""Run and project."""


class EventReader:
    """The events of one log: its rows, and the starts and ends of the runs it tells of.

    ``run`` and ``project`` name the run of rows that do not name one themselves. Events are appended to ``out``.
    ``seconds`` is the time they get on the monitor's clock.

    Args:
        announced: a log without a row yet is a run that starts.
        rename: names for a run whose log says itself what project and experiment it is of.
        met: told of each run before its first row; whether that is a new start of a run that another log was of.
        log: what the events say that they come from.
    """

    def __init__(self, run: str, project: str, make_reader: Callable[[], RecordReader], *, announced: bool = True,
                 rename: Callable[[str, str], Names] | None = None, met: Callable[[str], bool] = lambda run: False,
                 log: Log = ("", "")) -> None:
        self.run, self.project = run, project
        self._announced, self._rename, self._met, self._log = announced, rename, met, log
        self._make_reader = make_reader
        self.reader = make_reader()
        # Per run: None when all is told, else the ``restarted`` of the RunStarted that is due at its next row.
        self._runs: dict[str, bool | None] = {}
        self._over: set[str] = set()  # runs whose end the log has told itself
        self._titles: dict[str, Names] = {}  # names that the log has given to its runs
        self._own_rows = False

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs told of so far, at most a few thousand."""
        return tuple(self._runs)

    @property
    def titles(self) -> tuple[Names, ...]:
        """Names that the log itself has given to its runs."""
        return tuple(self._titles.values())

    def feed(self, data: bytes, seconds: float, live: bool, out: list[SourceEvent]) -> int:
        """Read on; the number of rows."""
        return self._tell_all(self.reader.feed(data), seconds, live, out)

    def idle(self, seconds: float, live: bool, out: list[SourceEvent]) -> int:
        """Nothing has come for some seconds: tell what there is of the last row; the number of rows."""
        return self._tell_all(self.reader.idle(), seconds, live, out)

    def finish(self, seconds: float, live: bool, out: list[SourceEvent]) -> int:
        """Read the last unit although its end never came; the number of rows."""
        return self._tell_all(self.reader.finish(), seconds, live, out)

    def _tell_all(self, records: Sequence[Record], seconds: float, live: bool, out: list[SourceEvent]) -> int:
        rows = 0
        for record in records:
            if isinstance(record, Row):
                self._tell(record, seconds, live, out)
                rows += 1
            elif isinstance(record, Config):
                self._configure(record, seconds, out)
            elif isinstance(record, End):
                run, _ = self._names(record.run)
                self._over.add(run)
                out.append(RunEnded(run, seconds, record.state, record.reason))
        return rows

    def _names(self, run: str) -> Names:
        """Names of a run that a record names: whole, or (``#2``) as one of several in a log that does not name them."""
        if run in self._titles:
            return self._titles[run]
        if not run:
            return self.run, self.project
        return (f"{self.run}{run}" if run.startswith("#") else clean_name(run)), self.project

    def _configure(self, config: Config, seconds: float, out: list[SourceEvent]) -> None:
        if config.experiment and self._rename is not None:
            self._titles[config.run] = self._rename(config.project, config.experiment)
        run, project = self._names(config.run)
        if "actor_rollout_ref" in config.values:  # else it may be anybody's
            self._start(run, project, seconds, out)
            out.append(RunConfig(run, seconds, config.values, project))

    def _tell(self, row: Row, seconds: float, live: bool, out: list[SourceEvent]) -> None:
        run, project = self._names(row.run)
        self._start(run, project, seconds, out)
        self._over.discard(run)
        self._own_rows = self._own_rows or run == self.run
        out.append(RawStep(run, row.step, seconds, row.values, project, live, self._log))

    def _start(self, run: str, project: str, seconds: float, out: list[SourceEvent]) -> None:
        due = self._runs[run] if run in self._runs else self._met(run)
        if due is None:
            return
        out.append(RunStarted(run, seconds, project, restarted=due, log=self._log))
        self._runs[run] = None
        if len(self._runs) > _RUNS_PER_FILE:
            del self._runs[next(iter(self._runs))]

    def announce(self, seconds: float, now: float, out: list[SourceEvent]) -> None:
        """All is read so far. A log that is still empty is a run that starts, and may have started at ``seconds``.

        A log that turns out to hold something else, such as verl's dumps of rollouts, takes the run back.
        """
        if not self._announced:  # a text that may be anybody's: a run is there when a row of it is
            return
        if not self._runs and not self.reader.read:
            self._start(self.run, self.project, seconds, out)
        elif self.run in self._runs and not self._own_rows and self.reader.read >= _FOREIGN_LINES:
            del self._runs[self.run]
            out.append(RunEnded(self.run, now, RunState.GONE, "its log holds no rows of it"))

    def revive(self, seconds: float, restarted: bool, out: list[SourceEvent]) -> None:
        """The log goes on after its end, or (``restarted``) is begun anew."""
        if restarted:
            self.reader = self._make_reader()
        self._over.clear()
        self._runs = dict.fromkeys(self._runs, restarted)
        if self.run in self._runs and self._announced:  # runs named by rows start when a row of theirs comes
            self._start(self.run, self.project, seconds, out)

    def end(self, seconds: float, state: RunState, reason: str, out: list[SourceEvent]) -> None:
        """Tell the end of the log's runs, but for those whose end it has told itself."""
        if state is RunState.FINISHED and self.reader.tells_end:
            state, reason = RunState.FAILED, f"{reason} without a word of the run's end, as when it is killed"
        out.extend(RunEnded(run, seconds, state, reason) for run in self._runs if run not in self._over)
