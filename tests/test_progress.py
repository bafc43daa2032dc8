"""Progress: its two forms, and states that are corrupt or of something else."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import batches, memory, mixture_of, one, three_in_memory

from zephon_torch import ChunkSplitter, DataLoader, WorkSourceDataset
from zephon_torch.errors import PlanMismatch, StateError
from zephon_torch.work import Progress

COUNTS = st.integers(0, 2**60)
DIGITS = st.text("0123456789abcdef", min_size=64, max_size=64)
SIGNED = st.integers(-(2**63), 2**63 - 1)


def source(seed: int = 3) -> Any:
    return mixture_of(three_in_memory(), seed=seed)


@pytest.fixture
def loader() -> DataLoader:
    loader = DataLoader(source(), batch_size=4)
    loop = iter(loader)
    next(loop)
    return loader


# --- two forms -----------------------------------------------------------------------------------


@given(epoch=COUNTS, delivered=COUNTS, lanes=st.integers(1, 2**30), fingerprint=DIGITS)
def test_both_forms_give_back_what_they_were_made_of(
    epoch: int, delivered: int, lanes: int, fingerprint: str
) -> None:
    progress = Progress(epoch, delivered, lanes, fingerprint, "text", (1, -2, 2**63 - 1, -(2**63)))
    assert Progress.from_dict(progress.to_dict()) == progress
    assert Progress.from_dict(json.loads(json.dumps(progress.to_dict()))) == progress
    again = Progress.from_words(progress.to_words())
    assert again == progress and again.digests == progress.digests
    assert again.to_words() == progress.to_words()
    tensor = torch.tensor(progress.to_words(), dtype=torch.int64)
    assert tensor.shape == (16,)
    assert Progress.from_words(tensor.tolist()) == progress


@given(at=st.integers(0, 15), change=SIGNED)
def test_any_changed_word_is_noticed(at: int, change: int) -> None:
    words = Progress(1, 2, 3, "ab" * 32, "", (4, 5, 6, 7)).to_words()
    changed = [*words[:at], change, *words[at + 1 :]]
    if changed == words:
        return
    if at > 12:
        return  # spare words
    with pytest.raises(StateError):
        Progress.from_words(changed)


@given(st.lists(st.integers(), max_size=20) | st.lists(st.integers(), min_size=16, max_size=16))
def test_any_other_integers_are_refused(words: list[int]) -> None:
    with pytest.raises(StateError):
        Progress.from_words(words)


def test_a_state_is_small_and_its_keys_are_fixed(loader: DataLoader) -> None:
    state = loader.state_dict()
    assert list(state) == ["version", "epoch", "delivered", "lanes", "fingerprint", "description"]
    assert len(json.dumps(state | {"description": ""})) < 1024
    assert json.loads(state["description"])["seed"] == 3


def test_a_state_survives_every_plain_carrier(loader: DataLoader) -> None:
    state = loader.state_dict()
    file = io.BytesIO()
    torch.save({"data": state}, file)
    file.seek(0)
    for carried in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)["data"]):
        other = DataLoader(source(), batch_size=4)
        other.load_state_dict(carried)
        assert other.state_dict() == state


# --- what is not a state -------------------------------------------------------------------------

SOUND = DataLoader(source(), batch_size=4).state_dict()
CORRUPT: list[Any] = [
    None,
    [],
    "state",
    7,
    {},
    {"model": {}, "optimizer": {}},
    {"state": {}, "param_groups": []},
    {"_snapshot": {}, "_steps_since_snapshot": 3, "_iterator_finished": False},
    *({k: v for k, v in SOUND.items() if k != key} for key in SOUND),
    *(SOUND | {key: None} for key in SOUND),
    *(SOUND | {key: "1"} for key in ("version", "epoch", "delivered", "lanes", "fingerprint")),
    *(SOUND | {key: 1.0} for key in SOUND),
    *(SOUND | {key: True} for key in SOUND),
    *(SOUND | {key: -1} for key in SOUND),
    *(SOUND | {key: np.nan} for key in SOUND),
    SOUND | {"version": 0},
    SOUND | {"version": 2},
    SOUND | {"lanes": 0},
    SOUND | {"epoch": 2**64},
    SOUND | {"lanes": 2**64},
    SOUND | {"delivered": 2**64},
    SOUND | {"fingerprint": SOUND["fingerprint"][:-1]},
    SOUND | {"fingerprint": SOUND["fingerprint"][:-1] + "x"},
    SOUND | {"fingerprint": SOUND["fingerprint"].upper()},
]


@pytest.mark.parametrize("state", CORRUPT, ids=lambda state: str(state)[:60])
def test_corrupt_and_foreign_states_leave_the_loader_as_it_was(
    loader: DataLoader, state: Any
) -> None:
    before = loader.state_dict()
    with pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert len(str(caught.value)) > 20, "in words"
    assert loader.state_dict() == before
    reference = DataLoader(source(), batch_size=4)
    batches(reference), batches(loader)
    assert batches(loader) == batches(reference), "the next epoch"


@given(
    st.dictionaries(
        st.sampled_from([*SOUND, "other"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=70)
        | st.binary(),
    )
)
def test_no_dict_at_all_breaks_anything(changes: dict[str, Any]) -> None:
    loader = DataLoader(one(memory("a", 8)), batch_size=4)
    before = loader.state_dict()
    try:
        loader.load_state_dict(before | changes)
    except StateError:
        assert loader.state_dict() == before
        return
    try:
        assert len(list(loader)) in (1, 2)
    except StateError:
        pass


def source_state() -> Any:
    node = source()
    next(node)
    return node.state_dict()


def node_state() -> Any:
    node = ChunkSplitter(source(), batch_size=4, rank=0, num_replicas=1).node()
    next(node)
    return node.state_dict()


def dataset_state() -> Any:
    dataset = WorkSourceDataset(source())
    next(iter(dataset))
    return dataset.state_dict()


def loader_state() -> Any:
    loader = DataLoader(source(), batch_size=4)
    next(iter(loader))
    return loader.state_dict()


def load_source(state: Any) -> None:
    source().reset(state)


def load_node(state: Any) -> None:
    ChunkSplitter(source(), batch_size=4, rank=0, num_replicas=1).node().reset(state)


def load_dataset(state: Any) -> None:
    WorkSourceDataset(source()).load_state_dict(state)


def load_loader(state: Any) -> None:
    DataLoader(source(), batch_size=4).load_state_dict(state)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "source": (source_state, load_source),
    "node of a rank": (node_state, load_node),
    "iterable dataset": (dataset_state, load_dataset),
    "loader": (loader_state, load_loader),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_states_of_different_kinds_are_not_mixed_up(saved: str, loaded: str) -> None:
    """They count different things: chunks, chunks of a rank, samples of a consumer, samples."""
    state, load = KINDS[saved][0](), KINDS[loaded][1]
    if saved == loaded:
        load(state)
    else:
        with pytest.raises(StateError):
            load(state)


# --- another plan --------------------------------------------------------------------------------


def test_a_mismatch_tells_the_difference_and_the_way_out() -> None:
    state = DataLoader(source(seed=4), batch_size=4).state_dict()
    loader = DataLoader(source(), batch_size=4)
    loader.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="seed: 4 at the checkpoint, 3 now") as caught:
        iter(loader)
    assert "strict=False" in str(caught.value)
    assert "repeat or be missed" in str(caught.value)


def test_words_tell_which_part_differs() -> None:
    words = DataLoader(source(seed=4), batch_size=4).progress.to_words()
    with pytest.raises(PlanMismatch, match="seed"):
        Progress.from_words(words).check(source().identity)


@pytest.mark.parametrize(
    "description", ["", "{", "[]", '{"seed": 3}', "null", '{"order_version": 1}']
)
def test_a_mismatch_without_a_readable_description_still_raises(description: str) -> None:
    state = SOUND | {"fingerprint": "0" * 64, "description": description}
    loader = DataLoader(source(), batch_size=4)
    loader.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="fingerprint 000000000000 then"):
        iter(loader)


def test_a_huge_number_of_datasets_keeps_the_description_short() -> None:
    datasets = [memory(f"dataset number {i:05d}", 2) for i in range(3000)]
    from zephon_torch import StaticMixtureWorkSource

    source = StaticMixtureWorkSource(datasets, {d.name: 1 for d in datasets})
    assert len(source.identity.description) <= 64 * 1024
    loader = DataLoader(source, batch_size=4)
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
