"""Data-parallel ranks that are one dimension of a DeviceMesh of four real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import SCRIPTS, Launch
from toys import flat, ids

sys.path.insert(0, str(SCRIPTS))

from meshes import SAVED_AFTER, loader_of

Notes = list[dict[str, Any]]  # of each of the four ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    launch = Launch("meshes.py", folder, world=4, output=folder / "output")
    try:
        launch.wait()
    finally:
        launch.kill()
    return folder


@pytest.fixture(scope="module")
def notes(folder: Path) -> Notes:
    return [json.loads((folder / f"notes.{rank}").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def epoch() -> list[list[int]]:
    """Global batches of one process."""
    return [ids(batch) for batch in loader_of(None)]


def joined(notes: Notes, what: str, ranks: list[int]) -> list[list[int]]:
    """Real samples of each step, ranks one after the other."""
    steps = zip(*(notes[rank][what] for rank in ranks), strict=True)
    return [
        [i for got, valid in step for i, real in zip(got, valid, strict=True) if real]
        for step in steps
    ]


@pytest.mark.parametrize("what", ["2x2 begun", "2x2 whole", "2x2 resumed"])
def test_tensor_parallel_peers_get_identical_batches(notes: Notes, what: str) -> None:
    """Ranks 0 and 1 are the peers of one data-parallel rank, 2 and 3 those of the other."""
    assert notes[0][what] == notes[1][what]
    assert notes[2][what] == notes[3][what]


def test_data_parallel_ranks_share_the_epoch(notes: Notes, epoch: list[list[int]]) -> None:
    """Each sample is on one of them, once."""
    assert joined(notes, "2x2 whole", [0, 2]) == epoch
    first, second = (flat(joined(notes, "2x2 whole", [rank])) for rank in (0, 2))
    assert sorted(first + second) == sorted(set(flat(epoch)))


def test_saved_in_the_middle_and_resumed_on_the_same_mesh(
    notes: Notes, epoch: list[list[int]]
) -> None:
    assert joined(notes, "2x2 begun", [0, 2]) == epoch[:SAVED_AFTER]
    assert joined(notes, "2x2 resumed", [0, 2]) == epoch[SAVED_AFTER:]


def test_resumed_on_a_mesh_of_four_data_parallel_ranks(
    notes: Notes, epoch: list[list[int]]
) -> None:
    assert joined(notes, "4x1 resumed", [0, 1, 2, 3]) == epoch[SAVED_AFTER:]


def test_resumed_without_a_mesh(folder: Path, epoch: list[list[int]]) -> None:
    loader = loader_of(None)
    loader.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    assert [ids(batch) for batch in loader] == epoch[SAVED_AFTER:]


def test_replicate_and_shard_flattened_are_data_parallel_ranks(
    notes: Notes, epoch: list[list[int]]
) -> None:
    """As for hybrid sharding (HSDP)."""
    assert joined(notes, "hybrid whole", [0, 1, 2, 3]) == epoch
    assert joined(notes, "hybrid resumed", [0, 1, 2, 3]) == epoch[SAVED_AFTER:]


def test_a_mesh_of_two_dimensions_is_refused_by_name(notes: Notes) -> None:
    for rank in notes:
        assert "'dp', 'tp'" in rank["2x2 refused"]
