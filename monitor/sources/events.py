"""The events of one log: its records, and the starts and ends of the runs it tells of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import clean_name
from monitor.sources.records import End, Record, RecordReader, Row

_RUNS_PER_FILE = 4096  # run names remembered of a file whose rows name their runs
_FOREIGN_LINES = 3  # lines without a row of its own after which an announced run is taken back


class EventReader:
    """The events of one log: its rows, and the starts and ends of the runs it tells of.

    ``run`` and ``project`` name the run of rows that do not name one themselves. Events are appended to ``out``.
    ``seconds`` is the time they get on the monitor's clock.
    """

    def __init__(self, run: str, project: str, make_reader: Callable[[], RecordReader], *,
                 announced: bool = True) -> None:
        self.run, self.project = run, project
        self._announced = announced
        self._make_reader = make_reader
        self.reader = make_reader()
        # Per run: None when all is told, else the ``restarted`` of the RunStarted that is due at its next row.
        self._runs: dict[str, bool | None] = {}
        self._own_rows = False

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs told of so far, at most a few thousand."""
        return tuple(self._runs)

    def feed(self, data: bytes, seconds: float, live: bool, out: list[SourceEvent]) -> int:
        """Read on; the number of rows."""
        return self._tell_all(self.reader.feed(data), seconds, live, out)

    def finish(self, seconds: float, live: bool, out: list[SourceEvent]) -> int:
        """Read the last unit although its end never came; the number of rows."""
        return self._tell_all(self.reader.finish(), seconds, live, out)

    def _tell_all(self, records: Sequence[Record], seconds: float, live: bool, out: list[SourceEvent]) -> int:
        rows = 0
        for record in records:
            if isinstance(record, Row):
                self._tell(record, seconds, live, out)
                rows += 1
            elif isinstance(record, End):
                out.append(RunEnded(self._name(record.run), seconds, record.state, record.reason))
        return rows

    def _name(self, run: str) -> str:
        """Name of a run that a record names: whole, or (``#2``) as one of several in a log that does not name them."""
        if not run:
            return self.run
        return f"{self.run}{run}" if run.startswith("#") else clean_name(run)

    def _tell(self, row: Row, seconds: float, live: bool, out: list[SourceEvent]) -> None:
        run = self._name(row.run)
        due = self._runs.get(run, False)
        if due is not None:
            out.append(RunStarted(run, seconds, self.project, restarted=due))
            self._runs[run] = None
            if len(self._runs) > _RUNS_PER_FILE:
                del self._runs[next(iter(self._runs))]
        self._own_rows = self._own_rows or run == self.run
        out.append(RawStep(run, row.step, seconds, row.values, self.project, live))

    def announce(self, seconds: float, now: float, out: list[SourceEvent]) -> None:
        """All is read so far. A log that is still empty is a run that starts, and may have started at ``seconds``.

        A log that turns out to hold something else, such as verl's dumps of rollouts, takes the run back.
        """
        if not self._announced:  # a text that may be anybody's: a run is there when a row of it is
            return
        if not self._runs and not self.reader.read:
            out.append(RunStarted(self.run, seconds, self.project))
            self._runs[self.run] = None
        elif self.run in self._runs and not self._own_rows and self.reader.read >= _FOREIGN_LINES:
            del self._runs[self.run]
            out.append(RunEnded(self.run, now, RunState.GONE, "its log holds no rows of it"))

    def revive(self, seconds: float, restarted: bool, out: list[SourceEvent]) -> None:
        """The log goes on after its end, or (``restarted``) is begun anew."""
        if restarted:
            self.reader = self._make_reader()
        self._runs = dict.fromkeys(self._runs, restarted)
        if self.run in self._runs and self._announced:  # runs named by rows start when a row of theirs comes
            out.append(RunStarted(self.run, seconds, self.project, restarted=restarted))
            self._runs[self.run] = None

    def end(self, seconds: float, state: RunState, reason: str, out: list[SourceEvent]) -> None:
        """Tell the end of the log's runs."""
        out.extend(RunEnded(run, seconds, state, reason) for run in self._runs)
