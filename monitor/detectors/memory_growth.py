"""Memory growth: memory rises step by step and will run out."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import median
from monitor.units import Unit, quantity

HOST = tuple(f"host_memory_used_bytes/{role}" for role in ("actor", "critic", "trainer"))
GPU = tuple(f"gpu_reserved_peak_bytes/{role}" for role in ("actor", "critic", "trainer"))
STEP_TIME = "stage_duration_seconds/step"
_BLOCK = 5  # values whose least is a block's: checkpoints and validation only add for a while
_MAX_BLOCKS = 24  # beyond, two become one of twice the length
_GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class MemoryGrowthSettings(Settings):
    """Limits of ``memory_growth``."""

    growth_ratio: float = setting(
        0.5, "ratio", "Growth since the run's first steps, over the level then, from which it is a leak.")
    growth_gib: float = setting(8.0, "GiB", "Growth below which there is none, whatever the ratio.")
    rising: float = setting(0.85, "ratio", "Share of neighbouring blocks that must have risen.")
    still: float = setting(0.6, "ratio", "Pace of the last third over that of all, below which it levels off.")
    skipped_blocks: float = setting(2.0, "blocks", "Blocks at the start that are loading and caching.")
    host_limit_gib: float = setting(0.0, "GiB", "Memory of a node, where it is known; 0: not known.")


SPEC = DetectorSpec(
    id="memory_growth",
    title="Memory growth",
    severity=Severity.WARNING,
    required=((*HOST, *GPU),),
    optional=(STEP_TIME,),
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
    misses="Growth below half of the first level, growth in jumps, and the limit itself where it is not configured: "
           "verl logs what is used, not what there is.",
    source="The run's own first steps. Healthy runs grow by up to 40 % in their first hundred steps and level off; a "
           "reported leak grew by 1.7 % of the first level a step.",
    guide="-",
    panel=HOST[:1],
    rise_steps=1,
    clear_steps=10,
    under=("non_finite",),
)


@dataclass(slots=True)
class _Series:
    """Least memory of equally long blocks of steps."""

    length: int = _BLOCK
    blocks: list[tuple[int, float]] = field(default_factory=list)  # first step, least bytes
    open: tuple[int, float] = (0, NAN)
    count: int = 0

    def add(self, step: int, value: float) -> bool:
        """Take in a value; whether a block was completed."""
        first, least = self.open
        self.open = (step, value) if self.count == 0 else (first, min(least, value))
        self.count += 1
        if self.count < self.length:
            return False
        self.blocks.append(self.open)
        self.count = 0
        if len(self.blocks) > _MAX_BLOCKS:
            self.blocks = [(a[0], min(a[1], b[1])) for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=False)]
            self.length *= 2
        return True


class MemoryGrowth(Detector):
    """The least memory of each five steps, and the robust line through them.

    A finding when nearly all of them rise, the last third as fast as the rest, by half of the first level and at least
    8 GiB. The line is Theil and Sen's, the median of all pairwise slopes. A false alarm would interrupt a run that only
    fills its caches.

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

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the memory that the row tells of."""
        values, shown = observation.values, ""
        self._step_seconds = values.get(STEP_TIME, self._step_seconds)
        for name in (*HOST, *GPU):
            value = values.get(name)
            if value is None or value != value or value <= 0.0:
                continue
            shown = shown or name
            series = self._series.get(name) or self._series.setdefault(name, _Series())
            if series.add(observation.step, value):
                finding = self._judge(name, series)
                if finding is not None:
                    self._found[name] = finding
                else:
                    self._found.pop(name, None)
        if not shown:
            return None
        if self._found:
            return max(self._found.values(), key=lambda verdict: (verdict.status, verdict.score))
        return Verdict(Status.OK, signal=shown, value=values[shown])

    def _judge(self, name: str, series: _Series) -> Verdict | None:
        blocks = series.blocks[int(self._s.skipped_blocks) if series.length == _BLOCK else 1:]
        if len(blocks) < 5:
            return None
        (first, start), (last, now) = blocks[0], blocks[-1]
        if now - start < max(self._s.growth_ratio * start, self._s.growth_gib * _GIB):
            return None
        rises = [b[1] > a[1] for a, b in pairwise(blocks)]
        pace, late = _slope(blocks), _slope(blocks[-max(4, len(blocks) // 3):])
        if sum(rises) < self._s.rising * len(rises) or late < self._s.still * pace:
            return None
        where = "Host memory" if name in HOST else "GPU memory held by the allocator"
        limit = self._s.host_limit_gib * _GIB if name in HOST else 0.0
        left = (limit - now) / pace if limit else NAN
        ahead = (f"; at this pace the {quantity(limit, Unit.BYTES)} of the node are full near step {last + left:.0f}"
                 if limit else f"; at this pace it has doubled near step {last + now / pace:.0f}")
        hours = (left if limit else now / pace) * self._step_seconds / 3600
        ahead += f", in {hours:.2g} h" if hours == hours else ""
        return Verdict(
            Status.CRITICAL if limit and left < 50 else Status.WARNING,
            score=max(1.0, (now - start) / (self._s.growth_ratio * start)), since_step=first, signal=name, value=now,
            threshold=start * (1 + self._s.growth_ratio),
            reason=f"{where} has grown from {quantity(start, Unit.BYTES)} to {quantity(now, Unit.BYTES)} since step "
                   f"{first}, {quantity(pace, Unit.BYTES)} a step without levelling off{ahead}.",
            evidence={"bytes_per_step": pace, "start_bytes": start, "bytes": now, "steps_left": left})


def _slope(blocks: list[tuple[int, float]]) -> float:
    """Theil and Sen's slope, in bytes a step."""
    return median([(b - a) / (y - x) for (x, a), (y, b) in combinations(blocks, 2) if y != x])
