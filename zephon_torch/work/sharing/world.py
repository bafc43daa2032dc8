"""Rank and world size of data parallelism: the only reader of torch.distributed.

They are resolved at the first use, not at construction, because trainers build the loader before
they initialise torch.distributed; from then on they are fixed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed

from zephon_torch.errors import WorldError
from zephon_torch.support import checks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_num_said = itertools.count()
_num_begun: Counter[str] = Counter()  # by epoch of a plan: as often as this process has begun it
_num_ended: Counter[str] = Counter()
_imported_by = os.getpid()
_STORE_ERRORS = (RuntimeError, ValueError, AttributeError, NotImplementedError)


class World:
    """Lazily resolved (rank, num_replicas).

    Args:
        rank: data-parallel rank; with `num_replicas`, overrides everything else.
        num_replicas: number of data-parallel ranks.
        mesh: a one-dimensional DeviceMesh, or a named dimension of a larger one: its ranks are the
            data-parallel ones, so that tensor or pipeline peers get identical batches.

    Raises:
        WorldError: only one of rank and num_replicas, a rank outside of [0, num_replicas), both a
            mesh and explicit numbers, or a mesh of several dimensions.
    """

    def __init__(
        self,
        rank: int | None = None,
        num_replicas: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if (rank is None) != (num_replicas is None):
            raise WorldError(f"give both rank and num_replicas: got {rank} and {num_replicas}")
        if mesh is not None:
            _check_mesh(mesh, rank)
        self._mesh = mesh
        self._given = None if rank is None or num_replicas is None else (rank, num_replicas)
        self._resolved: tuple[int, int] | None = None
        if self._given is not None:
            _check_rank(*self._given)

    def __getstate__(self) -> dict[str, Any]:
        """A process that was alone does not know the world of the one that it is sent to."""
        known = None if self._resolved == (0, 1) else self._resolved
        return self.__dict__ | {"_resolved": known}

    def resolve(self) -> tuple[int, int]:
        """(rank, num_replicas), the same at every call.

        Raises:
            WorldError: torch.distributed has come to disagree with what was resolved before, or
                the process was started as one of several and nothing tells its rank.
        """
        if self._given is not None:
            return self._given
        found = self._from_mesh() if self._mesh is not None else _from_torch()
        if self._resolved is None:
            self._resolved = found
        elif found != self._resolved:
            raise WorldError(
                f"the loader was first used as rank {self._resolved[0]} of {self._resolved[1]}, "
                f"now torch.distributed says rank {found[0]} of {found[1]}: use the loader only "
                "after init_process_group, or give rank= and num_replicas="
            )
        return self._resolved

    def first_said(self, words: str) -> str:
        """Return the words of the first rank at this call: `words` if it is this one.

        Ranks that run one program say the same. Not a collective: nobody waits for anybody, and a
        store of torch.distributed that cannot answer is no reason to stop. A forked child does not
        ask: it would share the store's connection with its parent.
        """
        if not self._asks_others():
            return words
        key = f"zephon_torch/{next(_num_said)}"
        try:
            return str(_default_store().compare_set(key, "", words).decode())
        except _STORE_ERRORS:
            return words

    def begin(self, plan: str, epoch: int) -> Roll | None:
        """Let the other ranks know that this one begins an epoch of a plan.

        None where other ranks need not begin it (rank= or a mesh was given, or there are none), or
        where the store of torch.distributed cannot count. Not a collective.
        """
        if not self._asks_others():
            return None
        key = f"zephon_torch/begun/{plan[:16]}/{epoch}"
        try:
            store = _default_store()
            store.add(f"{key}/{_num_begun[key] + 1}", 1)
        except _STORE_ERRORS:
            return None
        _num_begun[key] += 1
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Roll(key, epoch, *self.resolve(), _num_begun[key], store if is_agents else None)

    def _asks_others(self) -> bool:
        """Whether all ranks of torch.distributed run this loader, and may be asked."""
        is_forked = os.getpid() != _imported_by  # would share its parent's connection
        is_given = self._given is not None or self._mesh is not None
        return not is_forked and not is_given and self.num_replicas > 1

    @property
    def is_known(self) -> bool:
        """Whether rank and world are settled already: given, or torch.distributed is up."""
        if self._given is not None or self._mesh is not None:
            return True
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    @property
    def rank(self) -> int:
        """This process's data-parallel rank."""
        return self.resolve()[0]

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel ranks."""
        return self.resolve()[1]

    def _from_mesh(self) -> tuple[int, int]:
        assert self._mesh is not None
        return self._mesh.get_local_rank(), self._mesh.size()


@dataclass(frozen=True, slots=True)
class Roll:
    """Which ranks have begun an epoch of a plan, as torch.distributed's store counts it.

    Attributes:
        key: names the epoch in the store.
        epoch: its number.
        rank, num_ranks: this process's place.
        number: how many times this process has begun it by now.
        store: the store, where a launcher keeps it beyond the end of torch.distributed here.
        begun: when this process began it, in seconds of the monotonic clock.
    """

    key: str
    epoch: int
    rank: int
    num_ranks: int
    number: int
    store: Any
    begun: float = field(default_factory=time.monotonic)
    pid: int = field(default_factory=os.getpid)

    def end(self) -> int:
        """Count that this process has gone through it; returns how many times by now."""
        _num_ended[self.key] += 1
        return _num_ended[self.key]

    def num_begun(self, number: int) -> int | None:
        """Ranks that have begun it so many times; None where the store cannot say."""
        if self.pid != os.getpid():
            return None
        try:
            store = _default_store() if self.store is None else self.store
            return int(store.add(f"{self.key}/{number}", 0))
        except _STORE_ERRORS:
            return None


def _default_store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _from_torch() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdigit() and int(started) > 1:
        raise WorldError(
            f"this process was started as one of WORLD_SIZE={started}, but torch.distributed is "
            "not initialised: call torch.distributed.init_process_group before the loader is used, "
            "or give rank= and num_replicas="
        )
    return 0, 1


def _check_rank(rank: int, num_replicas: int) -> None:
    checks.integer("rank", rank, error=WorldError)
    checks.integer("num_replicas", num_replicas, error=WorldError)
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise WorldError(
            f"rank {rank} of num_replicas {num_replicas}: expected 0 <= rank < num_replicas"
        )


def _check_mesh(mesh: DeviceMesh, rank: int | None) -> None:
    if rank is not None:
        raise WorldError("give either a mesh or rank and num_replicas, not both")
    if not hasattr(mesh, "get_local_rank"):
        raise WorldError(f"mesh is {mesh!r}: expected a torch DeviceMesh")
    if mesh.ndim != 1:
        raise WorldError(
            f"the mesh has dimensions {mesh.mesh_dim_names or mesh.ndim}: give the data-parallel "
            "one of them, for example mesh['dp']"
        )
