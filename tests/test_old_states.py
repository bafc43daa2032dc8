"""States written when fingerprints hashed the spelling: they load, under any spelling of the order.

The files of ``tests/golden/states`` are of that time; see :mod:`old_states`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from old_states import BATCH_SIZE, BATCHES, SOURCES, file_of, read, source_of, states_of
from torch import nn

from zephon_torch import ChunkSplitter, DataLoader, WorkSourceDataset, bind
from zephon_torch.errors import PlanMismatch
from zephon_torch.work.identity.identity import fingerprint_of, part_hashes
from zephon_torch.work.sources.static_mixture import WorkSource

FOLLOWING = 6
# other spellings of the same order, which a state of words is recognised under as well
RESPELLED: dict[str, list[dict[str, Any]]] = {
    "one dataset, all defaults": [
        {"stop_after_passes": 1},
        {"interleave": "shuffle"},
        {"exhausted_policy": "redistribute"},
        {"exhausted_policy": "stop", "max_samples": 10**9},
        {"max_repeats": 0},
        {"max_repeats": {"a": 0}, "reshuffle_on_repeat": {"a": True}},
    ],
    "one shard, interleave given": [{"interleave": "balanced", "reshuffle_on_repeat": False}],
    "as DataLoader(shuffle=True) makes it": [
        {"shuffle_shards": True},
        {"shuffle_within_shard": True, "stop_after_passes": 1},
    ],
    "global beside the shards": [{"shuffle_within_shard": False}, {"shuffle_shards": False}],
    "mixture, all defaults": [{"stop_after_passes": 1}, {"reshuffle_on_repeat": {"c": True}}],
    "one pass written out": [{"stop_after_passes": None}],
    "stop": [
        {"exhausted_policy": dict.fromkeys("abc", "stop")},
        {"exhausted_policy": None, "max_repeats": 0},
    ],
    "endless": [{"reshuffle_on_repeat": {"a": True, "b": False, "c": True}}],
    "redistributed": [{"max_samples": 10**6}],
    "redistributed, with nobody to": [{"exhausted_policy": None}],
    "redistributed, but ended before": [{"exhausted_policy": None}, {"exhausted_policy": "repeat"}],
    "max_samples": [{"exhausted_policy": "repeat"}, {"stop_after_passes": 7}],
    "auto blocks": [{"shuffle_within_shard": True}],
    "blocks": [
        {"shuffle_within_shard": True},
        {"reshuffle_on_repeat": dict.fromkeys("abc", False)},
    ],
    "weights finer than 46 bits": [{"stop_after_passes": 1}],
    "fine weights, redistributed": [{"max_samples": 10**6}],
    "digests by name": [{"stop_after_passes": None}],
    "no room for names": [{"shuffle_shards": True}, {"shuffle_within_shard": True}],
}
# those for which it takes the description
DESCRIBED: dict[str, list[dict[str, Any]]] = {
    "chunks larger than the epoch": [{"chunk_size": 16384}, {"chunk_size": 100}],
    "two passes": [{"stop_after_passes": None, "exhausted_policy": "repeat", "max_samples": 165}],
    "policies by name": [{"max_repeats": {"c": 2, "b": 99}}],
    "the same policy for each name": [{"exhausted_policy": "stop"}],
    "at most two repeats": [{"max_repeats": {"a": 99, "b": 2, "c": 2}}],
    "max_samples beyond the end": [{"max_samples": None}],
    "blocks beyond the datasets": [{"shuffle_block_size": "auto"}, {"shuffle_block_size": 40}],
    "no shuffling": [{"reshuffle_on_repeat": True}, {"reshuffle_on_repeat": False}],
    "a dataset of no weight": [{"max_repeats": {"a": 1}}],
}
# those that even the description, too short for its options, does not give away
UNKNOWN: dict[str, list[dict[str, Any]]] = {"options by digest": [{"max_repeats": 0}]}


def cases(*tables: dict[str, list[dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(name, options, id=f"{name}: {options or 'as it was'}"[:90])
        for table in tables
        for name, spellings in table.items()
        for options in spellings
    ]


AS_IT_WAS: dict[str, list[dict[str, Any]]] = {name: [{}] for name in SOURCES}
RECOGNISED = cases(AS_IT_WAS, RESPELLED, DESCRIBED)


def read_source(source: WorkSource, state: Any) -> Any:
    source.reset(state)
    return source.get_state()


def read_node(source: WorkSource, state: Any) -> Any:
    node = ChunkSplitter(source, batch_size=4, lanes=2).node()
    node.reset(state)
    return node.get_state()


def read_consumer(source: WorkSource, state: Any) -> Any:
    consumer = WorkSourceDataset(source)
    consumer.load_state_dict(state)
    next(iter(consumer))
    return state | {
        key: value
        for key, value in consumer.state_dict().items()
        if key in ("fingerprint", "description")
    }


READERS = {"source": read_source, "node of a rank": read_node, "iterable dataset": read_consumer}


def batches_after(loader: DataLoader, number: int) -> list[Any]:
    """What follows a number of batches, to the end of the epoch or six more."""
    found = []
    for index, batch in enumerate(loader):
        if index >= number:
            found.append(batch.tolist())
        if len(found) == FOLLOWING:
            break
    return found


def test_every_file_has_its_source() -> None:
    assert {path.name for path in file_of("x").parent.iterdir()} == {
        file_of(n).name for n in SOURCES
    }
    assert RESPELLED.keys() | DESCRIBED.keys() | UNKNOWN.keys() == SOURCES.keys()


@pytest.mark.parametrize(("name", "options"), RECOGNISED)
def test_a_dict_of_then_goes_on_and_is_saved_as_one_of_now(
    name: str, options: dict[str, Any]
) -> None:
    state = read(name)["loader"]
    loader = DataLoader(source_of(SOURCES[name], **options), batch_size=BATCH_SIZE)
    loader.load_state_dict(state)
    expected = batches_after(DataLoader(source_of(SOURCES[name]), batch_size=BATCH_SIZE), BATCHES)
    assert loader.delivered == BATCHES * BATCH_SIZE
    again = loader.state_dict()
    assert again["fingerprint"] == loader.source.fingerprint
    assert (again["epoch"], again["delivered"]) == (state["epoch"], state["delivered"])
    assert batches_after(loader, 0) == expected and expected


@pytest.mark.parametrize(("name", "options"), cases(AS_IT_WAS, RESPELLED))
def test_words_of_then_go_on_through_a_model(name: str, options: dict[str, Any]) -> None:
    words = torch.tensor(read(name)["words"])
    model = nn.Linear(1, 1)
    loader = DataLoader(source_of(SOURCES[name], **options), batch_size=BATCH_SIZE)
    bind(model, loader)
    model.load_state_dict(model.state_dict() | {"data_progress._extra_state": words})
    expected = batches_after(DataLoader(source_of(SOURCES[name]), batch_size=BATCH_SIZE), BATCHES)
    assert loader.progress.fingerprint == loader.source.fingerprint
    assert batches_after(loader, 0) == expected and expected


@pytest.mark.parametrize(("name", "options"), cases(DESCRIBED, UNKNOWN))
def test_words_of_then_under_an_unusual_spelling_are_refused(
    name: str, options: dict[str, Any]
) -> None:
    loader = DataLoader(source_of(SOURCES[name], **options), batch_size=BATCH_SIZE)
    loader.stage_words(read(name)["words"])
    with pytest.raises(PlanMismatch, match=r"plan: its options [^-]*differ"):
        iter(loader)


@pytest.mark.parametrize(("name", "options"), cases(UNKNOWN))
def test_so_are_dicts_whose_description_is_too_short(name: str, options: dict[str, Any]) -> None:
    loader = DataLoader(source_of(SOURCES[name], **options), batch_size=BATCH_SIZE)
    loader.load_state_dict(read(name)["loader"])
    with pytest.raises(PlanMismatch, match=r"option max_repeats: {'datasets': 120, .*, 0 now"):
        iter(loader)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(("name", "options"), RECOGNISED)
def test_the_other_kinds_of_state_go_on(name: str, options: dict[str, Any], kind: str) -> None:
    state = read(name)[kind]
    source = source_of(SOURCES[name], **options)
    again = READERS[kind](source, state)
    assert again["fingerprint"] == source.fingerprint
    unsaid = ("fingerprint", "description")
    assert {k: v for k, v in again.items() if k not in unsaid} == {
        k: v for k, v in state.items() if k not in unsaid
    }


@pytest.mark.parametrize("name", SOURCES)
def test_both_routes_of_one_run_agree_whatever_their_age(name: str) -> None:
    """A model's words of then beside a loader's state of now, and the other way round."""
    then, now = read(name), states_of(SOURCES[name])
    now_dict = now["loader"] | {"description": now["description"]}
    for words, state in ((then["words"], now_dict), (now["words"], then["loader"])):
        loader = DataLoader(source_of(SOURCES[name]), batch_size=BATCH_SIZE)
        loader.stage_words(words)
        loader.load_state_dict(state)
        next(iter(loader))


@pytest.mark.parametrize("name", SOURCES)
def test_a_plan_that_differs_is_still_refused(name: str) -> None:
    states, plan = read(name), SOURCES[name]
    others: list[dict[str, Any]] = [
        {"seed": 99},
        {"chunk_size": 5},
        {"exhausted_policy": None, "max_repeats": None, "stop_after_passes": 3},
        {"shuffle_block_size": 3},
    ]
    for options in others:
        if name.startswith("max_samples") or "ended before" in name:
            options = options | {"max_samples": 7} if "stop_after_passes" in options else options
        loader = DataLoader(source_of(plan, **options), batch_size=BATCH_SIZE)
        loader.load_state_dict(states["loader"])
        with pytest.raises(PlanMismatch):
            iter(loader)
        loader = DataLoader(source_of(plan, **options), batch_size=BATCH_SIZE)
        loader.stage_words(states["words"])
        with pytest.raises(PlanMismatch):
            iter(loader)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_dcp_checkpoint_of_then_loads(tmp_path: Path) -> None:
    """DCP asks for every key that the state of now has: there must be none that is new."""
    name = "as DataLoader(shuffle=True) makes it"
    dcp.save({"loader": read(name)["loader"]}, checkpoint_id=tmp_path, no_dist=True)
    loader = DataLoader(list(range(50)), batch_size=BATCH_SIZE, shuffle=True)
    dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    whole = DataLoader(list(range(50)), batch_size=BATCH_SIZE, shuffle=True)
    with pytest.raises(PlanMismatch, match="format memory at the checkpoint, torch now"):
        iter(loader)
    loader = DataLoader(source_of(SOURCES[name]), batch_size=BATCH_SIZE)
    dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    whole = DataLoader(source_of(SOURCES[name]), batch_size=BATCH_SIZE)
    assert batches_after(loader, 0) == batches_after(whole, BATCHES)


# --- the other way round: code of then, states of now ---------------------------------------------

PLAINLY_SPELLED = {
    "one dataset, all defaults",
    "mixture, all defaults",
    "endless",
    "redistributed",
    "max_samples",
    "auto blocks",
    "blocks",
    "fine weights, redistributed",
    "weights finer than 46 bits",
}


@pytest.mark.parametrize("name", SOURCES)
def test_code_of_then_reads_a_state_of_now_under_the_plainest_spelling(name: str) -> None:
    """It hashes options as spelled, and names ``options`` of the description where they differ."""
    source = source_of(SOURCES[name])
    identity = source.plan.identity
    assert identity.given is not None and identity.plain is not None
    (parts,) = part_hashes(identity.given, [identity.plain.as_dict()])
    assert fingerprint_of(parts) == source.fingerprint
    description = json.loads(identity.description)
    assert description["options"] == identity.plain.as_dict()
    spelled = identity.given.options.as_dict()
    if name != "options by digest":
        assert description["options"] | description["given"] == spelled
    is_plain = read(name)["loader"]["fingerprint"] == source.fingerprint
    assert is_plain == (spelled == identity.plain.as_dict()) == (name in PLAINLY_SPELLED)
    if is_plain:
        now = states_of(SOURCES[name])
        assert now["words"] == read(name)["words"]
