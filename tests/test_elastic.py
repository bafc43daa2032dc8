"""A run goes on in any world: real ranks, saved and resumed twice on the way.

Every way to set a run up (*scenario*) is walked in three *legs*, each in other processes and
possibly in another world, with another engine and another batch size, saved in the middle of an
epoch and resumed there; the last leg goes past the end of the epoch. One launch walks a leg of all
scenarios. What all ranks together got is compared with loaders of one process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from launch import Launch
from toys import SIZES, STARTS, flat, ids, memory, mixture_of, three_in_files

from zephon_torch import DataLoader
from zephon_torch.work import WorkSource

WORLDS = (1, 2, 3, 4)
LEGS = range(3)
Place = tuple[int, int]  # epoch and samples delivered
Worlds = tuple[int, ...]  # of the legs so far
MOST = 144  # samples of an endless plan that are looked at: whole rounds for any lanes
# the same shards as the files that the ranks read
DATASETS = [
    memory(name, size, STARTS[name], [size // 3, size - size // 3]) for name, size in SIZES.items()
]

PLANS: dict[str, dict[str, Any]] = {
    "one pass": {"shuffle_block_size": "global"},
    "two passes": {"stop_after_passes": 2, "shuffle_within_shard": True},
    "a repeat": {"max_repeats": 1},
    "redistribute": {"exhausted_policy": "redistribute", "shuffle_block_size": 5},
    "70 samples": {"max_samples": 70, "interleave": "shuffle"},
    "endless": {"exhausted_policy": "repeat", "shuffle_block_size": "global"},
}
# for each leg: sizes of a batch, and where the leg ends (an endless plan: after 3 steps)
COURSES: dict[str, list[tuple[dict[str, int], int | str]]] = {
    "12": [
        ({"global_batch_size": 12}, 2),
        ({"global_batch_size": 12}, 2),
        ({"global_batch_size": 12}, "past"),
    ],
    "12, 24, 8": [
        ({"global_batch_size": 12}, 1),
        ({"global_batch_size": 24}, "edge"),
        ({"global_batch_size": 8}, "past"),
    ],
    "3 a rank": [({"batch_size": 3}, 2), ({"batch_size": 3}, 2), ({"batch_size": 3}, "past")],
}
ENGINES: dict[str, list[dict[str, int]]] = {
    "inline, a thread, 2 threads": [{"num_threads": 0}, {}, {"num_threads": 2}],
    "2 workers, 1 worker, a thread": [{"num_workers": 2}, {"num_workers": 1}, {}],
    "2 threads, 3 workers, inline": [{"num_threads": 2}, {"num_workers": 3}, {"num_threads": 0}],
}


@dataclass(frozen=True)
class Scenario:
    plan: str
    lanes: int
    drop_last: bool
    route: str
    course: str
    engines: str
    ahead: int  # of the world of the first leg is that of the second: 0 to 3, cyclically

    def __str__(self) -> str:
        drop = "drop" if self.drop_last else "pad"
        words = (self.plan, f"lanes {self.lanes}", drop, self.route, self.course, self.engines)
        return "; ".join((*words, f"world + {self.ahead}"))

    def size(self, leg: int, world: int) -> int:
        """Global batch size."""
        sizes = COURSES[self.course][leg][0]
        return sizes.get("global_batch_size") or sizes["batch_size"] * world

    def worlds(self, leg: int) -> list[int]:
        """Those that can share a global batch equally."""
        return [world for world in WORLDS if self.size(leg, world) % world == 0]

    def chains(self) -> list[Worlds]:
        """Worlds of the three legs."""
        return [
            (first, second, self.worlds(2)[(first + second) % len(self.worlds(2))])
            for first in self.worlds(0)
            if (second := WORLDS[(first - 1 + self.ahead) % 4]) in self.worlds(1)
        ]

    def until(self, leg: int) -> int | str:
        end = COURSES[self.course][leg][1]
        return 3 if isinstance(end, str) and self.plan == "endless" else end

    def job(self, chain: Worlds) -> dict[str, Any]:
        """The last leg of a chain, for the script."""
        leg = len(chain) - 1
        # later legs take the lanes from the state
        lanes = {"lanes": self.lanes} if leg == 0 else {}
        sizes = COURSES[self.course][leg][0]
        return {
            "name": self.name(chain),
            "resume": self.name(chain[:-1]) if leg else None,
            "plan": PLANS[self.plan],
            "loader": {"drop_last": self.drop_last}
            | lanes | sizes | ENGINES[self.engines][leg],
            "route": self.route,
            "until": self.until(leg),
        }  # fmt: skip

    def name(self, chain: Worlds) -> str:
        """Of the last leg of a chain. First legs are the same, whatever world comes next."""
        return f"{replace(self, ahead=0) if len(chain) == 1 else self}; worlds {chain}"


AXES: list[Sequence[Any]] = [
    list(PLANS), (1, 2, 4, 6), (False, True), ("loader", "model"), list(COURSES), list(ENGINES),
    range(4),
]  # fmt: skip


def everything() -> list[Scenario]:
    """The full product. Without an end there is no last batch to drop."""
    scenarios = [Scenario(*values) for values in product(*AXES)]
    return [s for s in scenarios if not (s.plan == "endless" and s.drop_last)]


@dataclass(frozen=True)
class Walk:
    """A scenario in the worlds of its three legs."""

    scenario: Scenario
    chain: Worlds

    def __str__(self) -> str:
        return self.scenario.name(self.chain)

    @property
    def values(self) -> dict[str, Any]:
        """What it has of each axis; the worlds are axes, too."""
        worlds = {f"world of leg {leg}": world for leg, world in enumerate(self.chain)}
        return vars(self.scenario) | worlds


def walks(scenarios: Iterable[Scenario]) -> list[Walk]:
    return [Walk(scenario, chain) for scenario in scenarios for chain in scenario.chains()]


T = TypeVar("T")


def covering(things: list[T], values: Callable[[T], dict[str, Any]], strength: int) -> list[T]:
    """Some of them, in which all values of any so many axes meet; always the same ones."""
    meetings = {thing: set(combinations(values(thing).items(), strength)) for thing in things}
    left = set[Any]().union(*meetings.values())
    chosen = []
    while left:
        chosen.append(max(things, key=lambda thing: len(meetings[thing] & left)))
        left -= meetings[chosen[-1]]
    return chosen


# --- with real processes -------------------------------------------------------------------------


class Relay:
    """Walks on real ranks.

    Attributes:
        steps: for the name of each leg and each of its ranks, the steps that the rank noted.
    """

    def __init__(self, folder: Path, walks: list[Walk], seconds: float) -> None:
        three_in_files(folder / "data")
        self._folder, self._walks = folder, walks
        self.steps: dict[str, list[list[Any]]] = defaultdict(list)
        for leg in LEGS:
            for pair in ((4, 1), (3, 2)):  # two at a time
                with ExitStack() as stack:
                    launches = [stack.enter_context(self._launch(leg, world)) for world in pair]
                    for launch in launches:
                        launch.wait(seconds)
                for world in pair:
                    self._read(leg, world)

    def _launch(self, leg: int, world: int) -> Launch:
        legs = ((walk.scenario, walk.chain[: leg + 1]) for walk in self._walks)
        jobs = {s.name(chain): s.job(chain) for s, chain in legs if chain[-1] == world}
        before = [str(self._path("states", leg - 1, world)) for world in WORLDS if leg]
        given = {"data": str(self._folder / "data"), "states": before, "jobs": list(jobs.values())}
        self._path("jobs", leg, world).write_text(json.dumps(given))
        paths = [self._path(what, leg, world) for what in ("jobs", "states", "notes")]
        output = self._path("output", leg, world)
        return Launch("elastic.py", *paths, world=world, output=output)

    def _read(self, leg: int, world: int) -> None:
        for rank in range(world):
            notes = Path(f"{self._path('notes', leg, world)}.{rank}")
            for line in map(json.loads, notes.read_text().splitlines()):
                self.steps[line["name"]].append(line["steps"])

    def _path(self, what: str, leg: int, world: int) -> Path:
        return self._folder / f"{what}-{leg}-{world}"


# --- what one process says -----------------------------------------------------------------------


@cache
def total_samples(plan: str) -> int | float:
    """Samples of an epoch."""
    return mixture_of(DATASETS, **PLANS[plan]).total_samples


def reference_source(plan: str) -> WorkSource:
    options = PLANS[plan] | ({"max_samples": MOST} if plan == "endless" else {})
    return mixture_of(DATASETS, **options)


@cache
def one_by_one(plan: str, lanes: int) -> list[list[int]]:
    """The samples of three epochs in the order of their delivery: batches of one sample."""
    loader = DataLoader(reference_source(plan), batch_size=1, lanes=lanes)
    return [flat(ids(batch) for batch in loader) for _ in range(3)]


@cache
def never_stopped(
    plan: str, lanes: int, drop_last: bool, size: int, start: Place
) -> dict[Place, list[int]]:
    """Global batches of one process by the place after each, from a place on."""
    loader = DataLoader(
        reference_source(plan), global_batch_size=size, lanes=lanes, drop_last=drop_last
    )
    if start != (0, 0):
        place = {"epoch": start[0], "delivered": start[1]}
        loader.load_state_dict(loader.state_dict() | place)
    found: dict[Place, list[int]] = {}
    while loader.epoch < 3:
        for batch in loader:
            found[loader.epoch, loader.delivered] = ids(batch)
    return found


def expected(
    scenario: Scenario, size: int, start: Place
) -> Iterator[tuple[Place, Place, list[int]]]:
    """Of each global batch: the place it begins at, the one after it, its samples in order."""
    epoch, begin = start
    # from a whole number of batches on: the very steps of a run that was never stopped
    since = (0, 0) if begin % size == 0 else start
    reference = never_stopped(scenario.plan, scenario.lanes, scenario.drop_last, size, since)
    total, least = total_samples(scenario.plan), size if scenario.drop_last else 1
    while True:
        if total - begin < least:  # saved with smaller batches, so near the end
            epoch, begin = epoch + 1, 0
        stop = int(min(begin + size, total))
        after = (epoch, stop) if total - stop >= least else (epoch + 1, 0)
        yield (epoch, begin), after, reference[after]
        epoch, begin = after


def check(walk: Walk, steps: dict[str, list[list[Any]]]) -> int:
    """Every leg is what one process says; how many global batches were compared."""
    compared, scenario = 0, walk.scenario
    delivery = one_by_one(scenario.plan, scenario.lanes)
    place: Place = (0, 0)
    trained: dict[int, list[int]] = defaultdict(list)  # ids by epoch
    for leg, world in enumerate(walk.chain):
        name, first = scenario.name(walk.chain[: leg + 1]), place[0]
        ranks, batches = steps[name], expected(scenario, scenario.size(leg, world), place)
        assert len(ranks) == world, name
        assert len({len(rank) for rank in ranks}) == 1, f"numbers of steps differ: {name}"
        for step in zip(*ranks, strict=True):
            (epoch, begin), place, batch = next(batches)
            got = global_batch(step)
            assert {tuple(noted[:2]) for noted in step} == {place}, name
            assert got == batch, name
            assert sorted(got) == sorted(delivery[epoch][begin : begin + len(got)]), name
            trained[epoch] += got
            compared += 1
        assert ends(scenario.until(leg), len(ranks[0]), first, place), name
    is_whole = scenario.plan != "endless" and not scenario.drop_last
    once = delivery[0] if is_whole else delivery[0][: len(trained[0])]
    assert sorted(trained[0]) == sorted(once), f"an epoch of {walk}"
    return compared


def global_batch(step: Sequence[Any]) -> list[int]:
    """Real samples of all ranks. Ranks get equally many; padding repeats samples of the batch."""
    assert len({len(got) for _, _, got, _ in step}) == 1, "sizes of the ranks' batches differ"
    real = flat(
        [i for i, is_real in zip(got, valid, strict=True) if is_real] for _, _, got, valid in step
    )
    assert {i for _, _, got, _ in step for i in got} == set(real)
    return real


def ends(until: int | str, num_steps: int, first: int, place: Place) -> bool:
    if isinstance(until, int):
        return num_steps == until
    return place[0] > first and (place[1] == 0) == (until == "edge")


# --- the tests -----------------------------------------------------------------------------------

# scenarios in which all values of any two axes meet, and of their walks such ones again
CHOSEN = covering(walks(covering(everything(), vars, 2)), lambda walk: walk.values, 2)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Relay:
    return Relay(tmp_path_factory.mktemp("relay"), CHOSEN, seconds=200)


@pytest.mark.timeout(600)  # the first one waits for twelve launches
@pytest.mark.parametrize("walk", CHOSEN, ids=str)
def test_a_run_goes_on_in_any_world(relay: Relay, walk: Walk) -> None:
    assert check(walk, relay.steps) > 5


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_run_goes_on_in_any_world(tmp_path: Path) -> None:
    """The full product without worker processes; with them, all values of any three axes meet."""
    in_threads = [s for s in everything() if s.engines == next(iter(ENGINES))]
    scenarios = list(dict.fromkeys(in_threads + covering(everything(), vars, 3)))
    every = walks(scenarios)
    relay = Relay(tmp_path, every, seconds=3600)
    compared = sum(check(walk, relay.steps) for walk in every)
    print(f"{len(scenarios)} scenarios, {len(every)} walks, {compared} global batches")
