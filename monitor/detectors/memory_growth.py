"""Memory growth: memory rises step by step and will run out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.facts import Facts
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import median
from monitor.units import Unit, quantity

HOST = tuple(f"host_memory_used_bytes/{role}" for role in ("actor", "critic", "trainer"))
GPU = tuple(f"gpu_{kind}_peak_bytes/{role}" for kind in ("reserved", "allocated")
            for role in ("actor", "critic", "trainer"))
LENGTHS = ("response_length_tokens/max", "response_length_tokens/mean")
STEP_TIME = "stage_duration_seconds/step"
_BLOCK = 5  # values whose least is a block's: checkpoints and validation only add for a while
_FEWEST_BLOCKS = 6
_MAX_BLOCKS = 24  # beyond, two become one of twice the length
_GIB = 2.0**30
_ALL = (*HOST, *GPU)
DEVICE = "gpu_memory_used_bytes"
_MOST_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class MemoryGrowthSettings(Settings):
    """Limits of ``memory_growth``."""

    growth_ratio: float = setting(
        0.3, "ratio", "Growth at an even pace, over the level where it began, from which it is a leak.")
    growth_gib: float = setting(8.0, "GiB", "Growth below which there is none, whatever the ratio.")
    rising: float = setting(0.85, "ratio", "Share of neighbouring blocks that must have risen.")
    further_ratio: float = setting(
        2.0, "ratio", "Growth still to come if its pace goes on to fall as it did, over the level now, from which it "
                      "does not level off in time.")
    skipped_blocks: float = setting(2.0, "blocks", "Blocks at the start that are loading and caching.")
    host_limit_gib: float = setting(0.0, "GiB", "Memory of a node, where it is known; 0: not known.")
    full_ratio: float = setting(0.95, "ratio", "Share of that memory at which processes are killed.")
    limit_growth_ratio: float = setting(
        0.05, "ratio", "Growth from which it is a leak when the limit is near: within ahead_ratio.")
    ahead_ratio: float = setting(
        3.0, "ratio", "How far ahead a limit may be, over the steps in which the growth was seen.")


SPEC = DetectorSpec(
    id="memory_growth",
    title="Memory growth",
    severity=Severity.WARNING,
    required=((*HOST, *GPU),),
    optional=(STEP_TIME, *LENGTHS),
    wake="perf/cpu_memory_used_gb and perf/max_memory_reserved_gb are logged by verl since 0.3",
    meaning="Memory grows at an even pace with every step and does not level off, as in a leak; validation and "
            "checkpoints, which only add for a while, are not counted.",
    impact="The node runs out of memory: Ray kills its newest worker, or the kernel kills any, and neither names the "
           "cause. With the pace the reason says when.",
    diagnosis=(
        "Which process grows: ps --sort=-rss on the node, and the roles in perf/ (actor, critic).",
        "Host: dataloader workers, a reward function that keeps answers, logged tables, offloaded parameters kept "
        "twice, Ray's object store (ray memory --stats-only).",
        "GPU: a tensor kept with its graph from step to step, fragmentation by growing lengths, a rollout engine that "
        "does not free its cache.",
    ),
    actions=(
        "save now and restart before the step that the reason names (trainer.save_freq)",
        "set data.dataloader_num_workers lower, and let the reward function keep nothing between calls",
        "free the rollout's cache between steps (actor_rollout_ref.rollout.free_cache_engine=True)",
        "try actor_rollout_ref.actor.fsdp_config.param_offload=False if host memory is what grows",
    ),
    misses="Growth below a third of the first level where no limit is configured, growth in jumps, GPU memory "
           "that grows along with the answers, and the limit itself where it is not configured: verl logs what is "
           "used, not what there is.",
    source="The run's own first steps. Healthy runs grow by up to 40 % in their first hundred steps and level off; a "
           "reported leak grew by 1.7 % of the first level a step, and its run was killed at 95 % of the "
           "node's memory.",
    guide="-",
    panel=HOST[:1],
    rise_steps=1,
    clear_steps=10,
    under=("non_finite",),
    facts=("gpu",),
)


_Block = tuple[int, float, float]  # first step, least bytes, greatest length of answers


@dataclass(slots=True)
class _Series:
    """Least memory of equally long blocks of steps."""

    length: int = _BLOCK
    blocks: list[_Block] = field(default_factory=list)
    low: float = math.inf  # least of all blocks
    # The block that is not complete yet:
    first: int = 0
    least: float = math.inf
    longest: float = 0.0
    count: int = 0

    def complete(self) -> None:
        """Put the block to the others, and begin the next one."""
        self.blocks.append((self.first, self.least, self.longest))
        self.low = min(self.low, self.least)
        self.least, self.longest, self.count = math.inf, 0.0, 0
        if len(self.blocks) > _MAX_BLOCKS:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=False)
            self.blocks = [(a[0], min(a[1], b[1]), max(a[2], b[2])) for a, b in pairs]
            self.length *= 2


class MemoryGrowth(Detector):
    """The least memory of each five steps, and the robust line through them.

    A finding when nearly all of them rise, by 30 % of the level where that began and at least 8 GiB; where the node's
    limit is known, also by 5 % if the line reaches it soon. Growth may begin at the run's first steps or later. The
    line is Theil and Sen's, the median of all pairwise slopes. Caches fill at a falling pace: if the pace of the last
    half, falling on as it did since the first, does not lead to three times the memory (or to the limit), it is no
    leak. Peaks of the GPU's allocator only ever rise, so they must outgrow the answers. A false alarm would interrupt
    a run that only fills its caches.

    >>> from monitor.model import Observation
    >>> detector = MemoryGrowth()
    >>> for step in range(100):
    ...     values = {"host_memory_used_bytes/trainer": (300 + 5 * step) * 2.0 ** 30}
    ...     verdict = detector.update(Observation("run", step, 0.0, values))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = MemoryGrowthSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(MemoryGrowthSettings, self._settings)
        self._series: dict[str, _Series] = {}
        self._found: dict[str, Verdict] = {}
        self._step_seconds = NAN
        # What the GPUs themselves say, by series: least memory in use since the last step; and memory in all.
        self._devices: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def probed(self, facts: Facts) -> None:
        """Follow the memory in use on the GPUs of a machine that the run has to itself; judged with its next step."""
        if facts.active_runs > 1:
            self._devices.clear()
            return
        for node in facts.nodes:
            for gpu in node.gpus if node.reachable and not node.recorded else ():
                name = f"{DEVICE}/{node.node}|{gpu.index}|{gpu.uuid}"
                if gpu.memory_used and gpu.memory_total and (name in self._totals or len(self._totals) < _MOST_DEVICES):
                    self._totals[name] = float(gpu.memory_total)
                    self._devices[name] = min(self._devices.get(name, math.inf), float(gpu.memory_used))

    def restarted(self, time_seconds: float) -> None:
        """New processes begin with little memory: their growth is their own."""
        self._series.clear()
        self._found.clear()
        self._devices.clear()
        self._totals.clear()

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the memory that the row tells of."""
        values, shown = observation.values, ""
        length = values.get(LENGTHS[0], NAN)
        if length != length:
            length = values.get(LENGTHS[1], 0.0)
        self._step_seconds = values.get(STEP_TIME, self._step_seconds)
        names: tuple[str, ...] = _ALL
        if self._devices:
            values, names = {**values, **self._devices}, (*_ALL, *self._devices)
            self._devices = {}
        for name in names:
            value = values.get(name)
            if value is None or value != value or value <= 0.0:
                continue
            shown = shown or name
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = _Series()
            if series.count == 0:
                series.first = observation.step
            series.count += 1
            if value < series.least:
                series.least = value
            if length > series.longest:
                series.longest = length
            if series.count >= series.length:
                series.complete()
                self._look(name, series)
        if not shown:
            return None
        if self._found:
            return max(self._found.values(), key=lambda verdict: (verdict.status, verdict.score))
        return Verdict(Status.OK, signal=shown, value=values[shown])

    def _look(self, name: str, series: _Series) -> None:
        grown = series.blocks[-1][1] - series.low >= self._s.growth_gib * _GIB
        finding = self._judge(name, series) if grown else None
        if finding is not None:
            self._found[name] = finding
        elif self._found:
            self._found.pop(name, None)

    def _judge(self, name: str, series: _Series) -> Verdict | None:
        blocks = series.blocks[int(self._s.skipped_blocks) if series.length == _BLOCK else 1:]
        # A leak may follow on caches that were filled first, so later beginnings are tried, too.
        for begin in sorted({0, len(blocks) // 3, len(blocks) // 2}):
            if len(blocks) - begin < _FEWEST_BLOCKS:
                break
            finding = self._judge_from(name, blocks[begin:])
            if finding is not None:
                return finding
        return None

    def _judge_from(self, name: str, blocks: list[_Block]) -> Verdict | None:
        """Judge an even growth over all these blocks."""
        s = self._s
        (first, start, short), (last, now, long) = blocks[0], blocks[-1]
        full = s.host_limit_gib * _GIB if name in HOST else 0.0
        limit = full * s.full_ratio
        ratio = s.limit_growth_ratio if limit else s.growth_ratio
        if now - start < max(ratio * start, s.growth_gib * _GIB) or now < max(block[1] for block in blocks):
            return None
        if name not in HOST and short > 0.0 and now / start - 1 <= 1.5 * (long / short - 1):
            return None
        half = len(blocks) // 2 + 1
        pace, early, late = _slope(blocks), _slope(blocks[:half]), _slope(blocks[-half:])
        rises = [b[1] > a[1] for a, b in pairwise(blocks)]
        if sum(rises) < s.rising * len(rises) or min(pace, late) <= 0.0:
            return None
        if late < early:  # the pace falls like exp(-steps / lasts)
            lasts = (blocks[-half][0] - blocks[0][0]) / math.log(early / late)
            if late * lasts < (max(0.0, limit - now) if limit else s.further_ratio * now):
                return None
        left = (limit - now) / pace if limit else NAN
        near = left <= s.ahead_ratio * (last - first)
        if not near and now - start < s.growth_ratio * start:
            return None
        where, of = "Host memory" if name in HOST else "Peak GPU memory of the allocator", "node"
        if name in self._totals:
            # An allocator that keeps what it frees may fill a GPU and be well: this limit tells when, not whether.
            full, of = self._totals[name], "GPU"
            node, index, _ = name.partition("/")[2].split("|")
            where = f"Memory in use on GPU {index} of {node}"
        ahead_steps = max(0.0, full - now if full else now) / pace
        ahead = (f"; at this pace the {quantity(full, Unit.BYTES)} of the {of} are full near step" if full else
                 "; at this pace it has doubled near step") + f" {last + ahead_steps:.0f}"
        hours = ahead_steps * self._step_seconds / 3600
        ahead += f", in {hours:.2g} h" if hours == hours else ""
        threshold = limit if near else start * (1 + s.growth_ratio)
        return Verdict(
            Status.CRITICAL if limit and left < 50 else Status.WARNING,
            score=max(1.0, now / threshold), since_step=first, signal=name, value=now, threshold=threshold,
            reason=f"{where} has grown from {quantity(start, Unit.BYTES)} to {quantity(now, Unit.BYTES)} since step "
                   f"{first}, {quantity(pace, Unit.BYTES)} a step without levelling off{ahead}.",
            evidence={"bytes_per_step": pace, "start_bytes": start, "bytes": now, "steps_left": left})


def _slope(blocks: list[_Block]) -> float:
    """Theil and Sen's slope, in bytes a step."""
    return median([(b - a) / (y - x) for (x, a, _), (y, b, _) in combinations(blocks, 2) if y != x])
