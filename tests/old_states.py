"""Sources whose states were written before fingerprints became those of the order.

``python tests/old_states.py`` writes a file of ``tests/golden/states`` for each source that has
none yet. Files that are there were written by older code: they are never written anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zephon_torch import ChunkSplitter, DataLoader, WorkSourceDataset
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource

FOLDER = Path(__file__).parent / "golden" / "states"
BATCHES = 3  # that the loader has handed over
BATCH_SIZE = 4

_THREE = {"a": [40], "b": [10, 15], "c": [3, 4, 5]}
_WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
_MANY = {f"dataset {i:04d}": [2, 1] for i in range(600)}
_LONG = {f"{'long ' * 30}{i:04d}": [2, 1] for i in range(400)}
_NAMED = {f"d{i:03d}": [3, 2] for i in range(120)}


def _mixture(**options: Any) -> dict[str, Any]:
    return {
        "datasets": _THREE,
        "weights": _WEIGHTS,
        "options": {"seed": 3, "chunk_size": 6} | options,
    }


def _equal(datasets: dict[str, list[int]], **options: Any) -> dict[str, Any]:
    return {"datasets": datasets, "weights": dict.fromkeys(datasets, 1), "options": options}


SOURCES: dict[str, dict[str, Any]] = {
    "one dataset, all defaults": _equal({"a": [40, 25]}),
    "one shard, interleave given": _equal({"a": [40]}, interleave="shuffle", seed=2**70),
    "as DataLoader(shuffle=True) makes it": _equal(
        {"dataset": [50]}, shuffle_shards=False, shuffle_block_size="global"
    ),
    "global beside the shards": _equal(
        {"dataset": [50]}, shuffle_within_shard=True, shuffle_block_size="global"
    ),
    "mixture, all defaults": _mixture(),
    "chunks larger than the epoch": _mixture(chunk_size=1 << 20),
    "one pass written out": _mixture(stop_after_passes=1),
    "two passes": _mixture(stop_after_passes=2),
    "stop": _mixture(exhausted_policy="stop"),
    "endless": _mixture(exhausted_policy="repeat", reshuffle_on_repeat={"b": False}),
    "policies by name": _mixture(
        exhausted_policy={"a": "stop", "b": "repeat"}, max_repeats={"c": 2, "b": 3}
    ),
    "the same policy for each name": _mixture(exhausted_policy=dict.fromkeys("abc", "stop")),
    "at most two repeats": _mixture(max_repeats=2),
    "redistributed": _mixture(exhausted_policy="redistribute", interleave="shuffle"),
    "redistributed, with nobody to": _equal(
        {"a": [8, 9]}, exhausted_policy="redistribute", shuffle_within_shard=True
    ),
    "redistributed, but ended before": _mixture(exhausted_policy="redistribute", max_samples=20),
    "max_samples beyond the end": _mixture(exhausted_policy="stop", max_samples=10**6),
    "max_samples": _mixture(max_samples=33),
    "auto blocks": _mixture(shuffle_block_size="auto"),
    "blocks": _mixture(shuffle_block_size=16, reshuffle_on_repeat=False),
    "blocks beyond the datasets": _mixture(shuffle_block_size=10**9, shuffle_within_shard=True),
    "no shuffling": _mixture(
        shuffle_shards=False, reshuffle_on_repeat={"a": False, "b": True, "c": False}
    ),
    "a dataset of no weight": _mixture(max_repeats={"a": 1, "none": 5})
    | {"datasets": _THREE | {"none": [9]}, "weights": _WEIGHTS | {"none": 0}},
    "weights finer than 46 bits": _mixture() | {"weights": {"a": 0.1 + 0.2, "b": 0.7, "c": 1e-9}},
    "fine weights, redistributed": _mixture(exhausted_policy="redistribute")
    | {"weights": {"a": 0.1 + 0.2, "b": 0.7, "c": 1e-9}},
    "digests by name": _equal(_MANY, stop_after_passes=1),
    "no room for names": _equal(_LONG, shuffle_shards=False, shuffle_block_size="global"),
    "options by digest": _equal(_NAMED, max_repeats=dict.fromkeys(_NAMED, 0)),
}


def source_of(plan: dict[str, Any], **options: Any) -> StaticMixtureWorkSource:
    """The source of an entry, some options spelled otherwise."""
    datasets = [
        Dataset.from_samples(name, range(sum(sizes)), shard_sizes=sizes)
        for name, sizes in plan["datasets"].items()
    ]
    return StaticMixtureWorkSource(datasets, plan["weights"], **(plan["options"] | options))


def states_of(plan: dict[str, Any]) -> dict[str, Any]:
    """A state of every kind, some way into the first epoch."""
    loader = DataLoader(source_of(plan), batch_size=BATCH_SIZE)
    loop = iter(loader)
    for _ in range(BATCHES):
        next(loop)
    consumer = WorkSourceDataset(source_of(plan))
    next(iter(consumer))
    source, splitter = source_of(plan), ChunkSplitter(source_of(plan), batch_size=4, lanes=2)
    node = splitter.node()
    next(source), next(node)
    dicts = {
        "loader": loader.state_dict(),
        "source": source.state_dict(),
        "node of a rank": node.state_dict(),
        "iterable dataset": consumer.state_dict(),
    }
    description = {state.pop("description") for state in dicts.values()}.pop()
    return dicts | {"words": loader.progress.to_words(), "description": description}


def file_of(name: str) -> Path:
    """The file of a source's states."""
    return FOLDER / (re.sub(r"\W+", "_", name) + ".json")


def read(name: str) -> dict[str, Any]:
    """The states of a source, as they were written."""
    states: dict[str, Any] = json.loads(file_of(name).read_text("utf-8"))
    description = states.pop("description")
    return {
        kind: state | {"description": description} if isinstance(state, dict) else state
        for kind, state in states.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, plan in SOURCES.items():
        if not file_of(name).exists():
            file_of(name).write_text(json.dumps(states_of(plan), indent=1) + "\n", "utf-8")
