"""Three plans, frozen: a plan whose order or identity changes breaks every run that is resumed.

``python tests/test_golden.py --write`` writes the files of ``tests/golden`` from the package as it
is. Do that only for a deliberate change of the order, and raise the order version with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest

from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.sharing.splitter import ChunkSplitter

FOLDER = Path(__file__).parent / "golden"

PLANS: dict[str, dict[str, Any]] = {
    # shard and within-shard shuffle, one pass of everything
    "shards_and_within": {
        "datasets": {"code": [10, 0, 8, 7], "prose": [20, 20], "web": [5, 3, 1, 3]},
        "weights": {"code": 0.3, "prose": 0.5, "web": 0.2},
        "options": {"seed": 42, "chunk_size": 24, "shuffle_within_shard": True},
        "chunks": [[0, 0], [1, 0], [3, 0], [0, 1], [2, 7]],
        "lanes": 1,
    },
    # block shuffle, shuffled labels, datasets that leave
    "blocks_redistributed": {
        "datasets": {"ñandú": [3] * 12, "a": [1, 2, 3, 4], "数据": [50]},
        "weights": {"ñandú": 7, "a": 0.25, "数据": 3},
        "options": {
            "seed": -7,
            "chunk_size": 16,
            "shuffle_block_size": "auto",
            "exhausted_policy": "redistribute",
            "interleave": "shuffle",
        },
        "chunks": [[0, 0], [1, 0], [5, 0], [0, 2]],
        "lanes": 4,
    },
    # a global shuffle of more samples than there are, without an end
    "huge_and_endless": {
        "datasets": {"big": [10**9] * 1000, "small": [33, 67], "fixed": [40]},
        "weights": {"big": 1.0, "small": 0.001, "fixed": 0.05},
        "options": {
            "seed": 2**70,
            "chunk_size": 100,
            "shuffle_block_size": "global",
            "exhausted_policy": "repeat",
            "reshuffle_on_repeat": {"fixed": False},
        },
        "chunks": [[0, 0], [1, 0], [10**11, 0], [0, 3], [10**11 + 1, 3]],
        "lanes": 8,
    },
}


def source_of(plan: dict[str, Any]) -> StaticMixtureWorkSource:
    datasets = [
        Dataset.from_samples(name, range(sum(sizes)), shard_sizes=sizes)
        for name, sizes in plan["datasets"].items()
    ]
    return StaticMixtureWorkSource(datasets, plan["weights"], **plan["options"])


def told(source: StaticMixtureWorkSource, pointers: Any) -> list[str]:
    """Each sample as one id: dataset/shard/sample#pass."""
    return [
        f"{source.names[dataset]}/{shard}/{sample}#{number}"
        for dataset, shard, sample, number in zip(
            *(array.tolist() for array in pointers.arrays()), strict=True
        )
    ]


def frozen(plan: dict[str, Any]) -> dict[str, Any]:
    """Everything that is kept of a plan."""
    source = source_of(plan)
    splitter = ChunkSplitter(
        source, global_batch_size=16, rank=1, num_replicas=2, lanes=plan["lanes"]
    )
    endless = source.plan.length is None
    return {
        "made by": "python tests/test_golden.py --write",
        "plan": plan,
        "fingerprint": source.fingerprint,
        "total_samples": None if endless else source.total_samples,
        "chunks": {
            f"chunk {k} of epoch {epoch}": told(source, source.chunk(k, epoch).pointers)
            for k, epoch in plan["chunks"]
        },
        "second of two ranks, 16 at a time": {
            f"step {step} of epoch {epoch}": told(source, splitter.pointers(step, epoch))
            for step, epoch in [(0, 0), (1, 0), (4, 0), (0, 1)]
        },
    }


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_as_it_was(name: str) -> None:
    kept, now = read(name), frozen(PLANS[name])
    assert kept["plan"] == PLANS[name]
    for key in kept:
        assert now[key] == kept[key], key
    assert now.keys() == kept.keys()


@pytest.mark.parametrize("name", ["shards_and_within", "blocks_redistributed"])
def test_what_was_kept_is_what_the_oracle_says(name: str) -> None:
    kept = read(name)
    plan = kept["plan"]
    options = plan["options"]
    expected = oracle.OraclePlan(
        plan["datasets"],
        plan["weights"],
        seed=options["seed"],
        chunk_size=options["chunk_size"],
        levels=oracle.Levels(
            True, options.get("shuffle_within_shard", False), options.get("shuffle_block_size")
        ),
        options=oracle.Options(exhausted_policy=options.get("exhausted_policy")),
        interleave=options.get("interleave", "balanced"),
    )
    assert expected.length == kept["total_samples"]
    size = options["chunk_size"]
    for k, epoch in plan["chunks"]:
        pointers = expected.pointers(epoch)[k * size : (k + 1) * size]
        assert kept["chunks"][f"chunk {k} of epoch {epoch}"] == [
            f"{name}/{shard}/{sample}#{number}" for name, shard, sample, number in pointers
        ]


def test_every_file_has_its_plan() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(PLANS)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    FOLDER.mkdir(exist_ok=True)
    for plan_name, described in PLANS.items():
        text = json.dumps(frozen(described), indent=1, ensure_ascii=False)
        (FOLDER / f"{plan_name}.json").write_text(text + "\n", "utf-8")
