"""Independent oracle: the plan from its definitions, one sample at a time.

Plain Python integers, lists and fractions; nothing of the package and no numpy. Nothing here is
fast, and nothing uses a closed formula where the definition is a process: apportionment carries an
error accumulator at every node of the tree, stopping rules are simulated sample by sample, orders
are written out in full. What the package computes directly for one position must equal what comes
out here at that position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from math import gcd, isqrt, lcm

WORD = 2**64
M1 = 0x9FB21C651E98DF25
M2 = 0xD6E8FEB86659FD93
GOLDEN = 0x9E3779B97F4A7C15

# --- keys and permutations -----------------------------------------------------------------------


def mix(z: int) -> int:
    z = ((z ^ (z >> 32)) * M1) % WORD
    z = ((z ^ (z >> 29)) * M2) % WORD
    return z ^ (z >> 32)


def subkey(key: int, *numbers: int) -> int:
    for number in numbers:
        key = mix((key + (number + 1) * GOLDEN) % WORD)
    return key


def text_key(*parts: str) -> int:
    message = b""
    for part in parts:
        data = part.encode()
        message += len(data).to_bytes(8, "little") + data
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")


def permute(x: int, n: int, key: int) -> int:
    """Image of x under the permutation of [0, n) that the key selects."""
    return ranked(x, n, key) if n <= 32 else feistel(x, n, key)


def ranked(x: int, n: int, key: int) -> int:
    return by_hash(n, key).index(x)


@lru_cache(maxsize=64)
def by_hash(n: int, key: int) -> list[int]:
    k = mix(key)
    return sorted(range(n), key=lambda j: (mix((k + j) % WORD), j))


def feistel(x: int, n: int, key: int, rounds: int = 12) -> int:
    """Image of x under the cycle-walking Feistel network alone, for any n >= 2."""
    k = mix(key)
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(x, b)
        for r in range(1, rounds + 1):
            round_key = (k + r * GOLDEN) % WORD
            if r % 2:
                left = (left + (round_function(right ^ round_key) * a >> 32)) % a
            else:
                right = (right + (round_function(left ^ round_key) * b >> 32)) % b
        x = left * b + right
        if x < n:
            return x


def round_function(t: int) -> int:
    u = (t * M1) % WORD
    return (((u ^ (u >> 32)) * M2) % WORD) >> 32


def hash_order(key: int, n: int) -> list[int]:
    """Items of [0, n) by hash, of which the lowest bits do not count."""
    k = mix(key)
    ignored = (n - 1).bit_length()
    return sorted(range(n), key=lambda item: (mix((k + item) % WORD) >> ignored, item))


# --- weights -------------------------------------------------------------------------------------


def exact(weight: float | Fraction) -> Fraction:
    """A float is its shortest decimal text."""
    return Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight)


def integer_weights(weights: Sequence[Fraction], limit: int = 2**46) -> list[int]:
    """Smallest integers in the ratio of the weights, or `limit` units by largest remainder."""
    common = lcm(*(w.denominator for w in weights))
    integers = [int(w * common) for w in weights]
    divisor = gcd(*integers)
    integers = [i // divisor for i in integers]
    total = sum(integers)
    if total <= limit:
        return integers
    ideal = [Fraction(i * limit, total) for i in integers]
    units = [max(1, share.numerator // share.denominator) for share in ideal]
    while sum(units) < limit:
        # the most underserved one gets the next unit; ties: larger weight, then earlier
        best = max(range(len(units)), key=lambda i: (ideal[i] - units[i], integers[i], -i))
        units[best] += 1
    if sum(units) > limit:
        raise NotImplementedError("more weights were raised to one unit than units were left over")
    return units


# --- apportionment -------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A node of the split tree; `owed` is the error accumulator of its heavy child."""

    number: int
    weight: int
    heavy: Node | None = None
    light: Node | None = None
    depth: int = 0
    owed: int = 0


def huffman(weights: Sequence[int]) -> Node:
    """Join the two first by (weight, age) until one tree is left; the second one is heavy."""
    forest = [Node(number, weight) for number, weight in enumerate(weights)]
    number = len(forest)
    while len(forest) > 1:
        forest.sort(key=lambda node: (node.weight, node.number))
        light, heavy, *rest = forest
        forest = [*rest, Node(number, light.weight + heavy.weight, heavy, light)]
        number += 1
    set_depth(forest[0], 0)
    return forest[0]


def set_depth(node: Node, depth: int) -> None:
    node.depth = depth
    for child in (node.heavy, node.light):
        if child is not None:
            set_depth(child, depth + 1)


def nodes(root: Node) -> Iterator[Node]:
    yield root
    for child in (root.heavy, root.light):
        if child is not None:
            yield from nodes(child)


def take(root: Node) -> int:
    """Send one item down the tree: the leaf it arrives at."""
    node = root
    while node.heavy is not None and node.light is not None:
        node.owed += node.heavy.weight
        if node.owed >= node.weight:
            node.owed -= node.weight
            node = node.heavy
        else:
            node = node.light
    return node.number


def apportion(weights: Sequence[int]) -> Iterator[int]:
    """Endless: the leaf of position 0, 1, 2, ..."""
    root = huffman(weights)
    for node in nodes(root):
        node.owed = node.weight // 2
    while True:
        yield take(root)


def counts(weights: Sequence[int], prefix: int) -> list[int]:
    result = [0] * len(weights)
    for _, leaf in zip(range(prefix), apportion(weights), strict=False):
        result[leaf] += 1
    return result


def position(weights: Sequence[int], leaf: int, m: int) -> int:
    """Smallest p with n_leaf(p) >= m, by going there."""
    seen = 0
    for p, arrived in enumerate(apportion(weights)):
        if seen >= m:
            return p
        seen += arrived == leaf
    raise AssertionError("endless")


# --- order inside a piece ------------------------------------------------------------------------


def primes() -> Iterator[int]:
    found: list[int] = []
    candidate = 2
    while True:
        if all(candidate % p for p in found):
            found.append(candidate)
            yield candidate
        candidate += 1


@cache
def alpha(depth: int) -> int:
    """Fractional part of the square root of a prime, in 64 bits."""
    number = min(depth, 63)
    prime = next(p for i, p in enumerate(primes()) if i == number)
    return isqrt(prime * 2**128) % WORD


def balanced(weights: Sequence[int], quotas: Sequence[int], chunk: int, key: int) -> list[int]:
    """Leaf at each offset of a piece.

    The quotas must be those of a stretch of the tree: differences of its counts.
    """
    root = huffman(weights)
    ways = {}
    for node in nodes(root):
        if node.heavy is not None:
            of_node = quota_of(node, quotas)
            of_heavy = quota_of(node.heavy, quotas)
            fraction = (alpha(node.depth) * chunk + subkey(key, node.number)) % WORD
            ways[node.number] = iter(node_ways(node, of_node, of_heavy, fraction))

    def leaf_of_next() -> int:
        node = root
        while node.heavy is not None and node.light is not None:
            node = node.heavy if next(ways[node.number]) else node.light
        return node.number

    return [leaf_of_next() for _ in range(sum(quotas))]


def node_ways(node: Node, of_node: int, of_heavy: int, fraction: int) -> list[bool]:
    """Where each item of a node goes in this piece: True for the heavy child."""
    assert node.heavy is not None
    one = 2**32
    rate = (one * node.heavy.weight + node.weight // 2) // node.weight
    owed = of_node + ((fraction >> 32) * (one - 2 * of_node) >> 32)
    ways = []
    for _ in range(of_node):
        owed += rate
        ways.append(owed >= one)
        owed -= one * ways[-1]
    missing = of_heavy - sum(ways)
    assert missing in (-1, 0, 1)
    if missing:
        # one of the last sixteenth of those that went the wrong way goes the other way
        wrong = [n for n, to_heavy in enumerate(ways) if to_heavy == (missing == -1)]
        late = (len(wrong) + 15) // 16
        flipped = wrong[-1 - ((mix(fraction) >> 32) * late >> 32)]
        ways[flipped] = not ways[flipped]
    return ways


def quota_of(node: Node, quotas: Sequence[int]) -> int:
    if node.heavy is None or node.light is None:
        return quotas[node.number]
    return quota_of(node.heavy, quotas) + quota_of(node.light, quotas)


def shuffled(quotas: Sequence[int], start: int, key: int) -> list[int]:
    """Leaf at each offset of a piece: the sorted labels, permuted."""
    labels = [leaf for leaf, quota in enumerate(quotas) for _ in range(quota)]
    n = len(labels)
    if n > 32:
        return [labels[feistel(offset, n, subkey(key, start))] for offset in range(n)]
    return [labels[ranked(offset, n, subkey(key, start))] for offset in range(n)]


# --- order of one dataset ------------------------------------------------------------------------


@dataclass(frozen=True)
class Levels:
    shards: bool = True
    within_shard: bool = False
    block_size: int | str | None = None


def one_pass(
    name: str,
    sizes: Sequence[int],
    *,
    seed: int,
    levels: Levels,
    epoch: int,
    pass_index: int,
    reshuffle: bool = True,
) -> list[tuple[int, int]]:
    """(shard, sample) in the order of one pass, written out in full."""
    dataset_key = text_key("zephon_torch/order/1", str(seed), name)
    key = subkey(dataset_key, epoch, pass_index) if reshuffle else subkey(dataset_key, 0, 0)
    # what is numbered are the shards that hold something; `real` leads back
    real = [shard for shard, size in enumerate(sizes) if size]
    held = [sizes[shard] for shard in real]
    total = sum(held)
    in_file_order = [(j, sample) for j, size in enumerate(held) for sample in range(size)]

    if levels.block_size == "global":
        order = [in_file_order[permute(o, total, subkey(key, 3))] for o in range(total)]
        return [(real[j], sample) for j, sample in order]

    shard_order = list(range(len(held)))
    if levels.shards:
        shard_order = hash_order(subkey(key, 0), len(held))
    within = levels.within_shard and levels.block_size is None
    laid_out = []
    for j in shard_order:
        for offset in range(held[j]):
            sample = permute(offset, held[j], subkey(key, 1, j)) if within else offset
            laid_out.append((j, sample))

    if levels.block_size is not None:
        block = levels.block_size
        if block == "auto":
            block = min(8 * max(held), total)
        assert isinstance(block, int)
        windows = [laid_out[at : at + block] for at in range(0, total, block)]
        laid_out = [
            window[permute(offset, len(window), subkey(key, 2, b))]
            for b, window in enumerate(windows)
            for offset in range(len(window))
        ]
    return [(real[j], sample) for j, sample in laid_out]


# --- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The stop rules, the same words as the package's; None means not given."""

    stop_after_passes: int | None = None
    exhausted_policy: str | Mapping[str, str] | None = None
    max_repeats: int | Mapping[str, int] | None = None
    max_samples: int | None = None
    reshuffle_on_repeat: bool | Mapping[str, bool] = True


@dataclass(frozen=True)
class Piece:
    """What is spread as one: part of one chunk, with the datasets that take part."""

    chunk: int
    start: int
    stop: int
    members: list[int]


@dataclass
class Stream:
    """Which dataset each position of the plan belongs to, before the order inside pieces."""

    labels: list[int] = field(default_factory=list)
    departures: list[int] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    ended: bool = False


def of(option: object, name: str, default: object) -> object:
    """Value of an option that is a scalar or a mapping by name."""
    if isinstance(option, Mapping):
        return option.get(name, default)
    return default if option is None else option


def run(
    names: Sequence[str], sizes: Sequence[int], weights: Sequence[int], options: Options, limit: int
) -> Stream:
    """Consume one sample at a time until a rule says stop, or for `limit` samples."""
    if options.exhausted_policy == "redistribute":
        return run_redistributed(sizes, weights, options, limit)
    # a mapping that names nobody is as good as none
    given = bool(options.exhausted_policy) or options.max_repeats not in (None, {})
    floor = options.stop_after_passes
    if floor is None and not given:
        floor = 1
    caps: list[int | None] = []
    for name in names:
        repeats = of(options.max_repeats, name, None)
        if of(options.exhausted_policy, name, "repeat") == "stop":
            caps.append(1)
        else:
            assert repeats is None or isinstance(repeats, int)
            caps.append(None if repeats is None else 1 + repeats)

    stream = Stream(members=[list(range(len(names)))])
    used = [0] * len(names)
    for leaf in apportion(weights):
        cap = caps[leaf]
        if len(stream.labels) == options.max_samples:
            stream.ended = True
        if cap is not None and used[leaf] == cap * sizes[leaf]:
            stream.ended = True
        if floor is not None and all(u >= floor * s for u, s in zip(used, sizes, strict=True)):
            stream.ended = True
        if stream.ended or len(stream.labels) == limit:
            return stream
        stream.labels.append(leaf)
        used[leaf] += 1
    raise AssertionError("endless")


def run_redistributed(
    sizes: Sequence[int], weights: Sequence[int], options: Options, limit: int
) -> Stream:
    """As datasets run out they leave, and the mixture starts anew without them."""
    left = list(sizes)
    stream = Stream()
    members = list(range(len(sizes)))
    while members:
        stream.members.append(members)
        for number in apportion([weights[i] for i in members]):
            if len(stream.labels) == options.max_samples:
                stream.ended = True
            if stream.ended or len(stream.labels) == limit:
                return stream
            leaf = members[number]
            stream.labels.append(leaf)
            left[leaf] -= 1
            if not left[leaf]:
                break
        stream.departures.append(len(stream.labels))
        members = [i for i in members if left[i]]
    stream.ended = True
    return stream


def pieces(stream: Stream, chunk_size: int) -> list[Piece]:
    """Chunks, the last one shorter, cut where a dataset departs."""
    end = len(stream.labels)
    cuts = sorted({*range(0, end, chunk_size), *stream.departures, end})
    result = []
    for start, stop in pairwise(cuts):
        segment = sum(departure <= start for departure in stream.departures)
        result.append(Piece(start // chunk_size, start, stop, stream.members[segment]))
    return result


Pointer = tuple[str, int, int, int]
"""Dataset name, shard, sample, pass."""


@dataclass
class OraclePlan:
    """A whole plan, or its first `limit` positions, written out.

    Datasets are given as name -> samples per shard.
    """

    datasets: Mapping[str, Sequence[int]]
    weights: Mapping[str, float | Fraction]
    seed: int = 0
    chunk_size: int = 16384
    levels: Levels = Levels()
    options: Options = Options()
    interleave: str = "balanced"
    limit: int = 2000

    def __post_init__(self) -> None:
        self.names = sorted(
            name for name, sizes in self.datasets.items() if sum(sizes) and self.weights[name]
        )
        self.sizes = [sum(self.datasets[name]) for name in self.names]
        self.integers = integer_weights([exact(self.weights[name]) for name in self.names])
        self.stream = run(self.names, self.sizes, self.integers, self.options, self.limit)
        self.labels = self._spread()

    @property
    def length(self) -> int | None:
        """Positions of the plan; None when it did not end within the limit."""
        return len(self.stream.labels) if self.stream.ended else None

    def _spread(self) -> list[int]:
        """Which dataset stands at each position: the quotas of each piece, put in order."""
        key = text_key("zephon_torch/interleave/1", str(self.seed))
        labels = []
        for piece in pieces(self.stream, self.chunk_size):
            in_piece = self.stream.labels[piece.start : piece.stop]
            quotas = [in_piece.count(member) for member in piece.members]
            if self.interleave == "balanced":
                weights = [self.integers[member] for member in piece.members]
                order = balanced(weights, quotas, piece.chunk, key)
            else:
                order = shuffled(quotas, piece.start, key)
            labels += [piece.members[leaf] for leaf in order]
        return labels

    def pointers(self, epoch: int = 0) -> list[Pointer]:
        """What stands at each position: every dataset's stream, taken in turn."""
        streams = [self._stream_of(i, epoch) for i in range(len(self.names))]
        return [next(streams[label]) for label in self.labels]

    def _stream_of(self, i: int, epoch: int) -> Iterator[Pointer]:
        name, number = self.names[i], 0
        reshuffle = of(self.options.reshuffle_on_repeat, name, True)
        while True:
            order = one_pass(
                name,
                self.datasets[name],
                seed=self.seed,
                levels=self.levels,
                epoch=epoch,
                pass_index=number,
                reshuffle=bool(reshuffle),
            )
            for shard, sample in order:
                yield name, shard, sample, number
            number += 1


@dataclass
class OracleCourse(OraclePlan):
    """A plan of phases: as (samples or None for an open one, name -> weight, zeros allowed)."""

    phases: Sequence[tuple[int | None, Mapping[str, float | Fraction]]] = ()
    lanes: int = 1

    def __post_init__(self) -> None:
        self.names = sorted(
            name
            for name, sizes in self.datasets.items()
            if sum(sizes) and any(weights[name] for _, weights in self.phases)
        )
        self.labels, self.begins = [], []
        key, planned = text_key("zephon_torch/interleave/1", str(self.seed)), 0
        mixture: tuple[list[int], list[int]] | None = None
        for samples, weights in self.phases:
            live = [i for i, name in enumerate(self.names) if weights[name]]
            new = live, integer_weights([exact(weights[self.names[i]]) for i in live])
            if new != mixture:  # the same ratio goes on as it was
                mixture, tree = new, apportion(new[1])
            self.begins.append(len(self.labels))
            planned = self.limit if samples is None else planned + samples
            while len(self.labels) < planned or len(self.labels) % (self.chunk_size * self.lanes):
                chunk = [next(tree) for _ in range(self.chunk_size)]
                self.labels += [live[leaf] for leaf in self._in_order(new[1], chunk, key)]

    @property
    def length(self) -> int | None:
        return None if self.phases[-1][0] is None else len(self.labels)

    def _in_order(self, weights: Sequence[int], chunk: Sequence[int], key: int) -> Sequence[int]:
        quotas = [chunk.count(leaf) for leaf in range(len(weights))]
        if self.interleave == "balanced":
            return balanced(weights, quotas, len(self.labels) // self.chunk_size, key)
        return shuffled(quotas, len(self.labels), key)


# --- delivery ------------------------------------------------------------------------------------


def lane_queues(length: int, lanes: int, chunk_size: int) -> list[list[list[int]]]:
    """Rounds, each as one list of positions per lane, to be consumed from the front."""
    rounds = []
    start = 0
    while length - start >= lanes * chunk_size:
        rounds.append(
            [
                list(range(start + lane * chunk_size, start + (lane + 1) * chunk_size))
                for lane in range(lanes)
            ]
        )
        start += lanes * chunk_size
    rest = list(range(start, length))
    last = []
    for lane in range(lanes):
        size = len(rest) // (lanes - lane) + (len(rest) % (lanes - lane) > 0)
        last.append(rest[:size])
        rest = rest[size:]
    return [*rounds, last]


def delivery(length: int, lanes: int, chunk_size: int) -> list[tuple[int, int]]:
    """(lane, position) in the order of delivery: the lanes take turns."""
    order = []
    for queues in lane_queues(length, lanes, chunk_size):
        turn = 0
        while any(queues):
            order.append((turn % lanes, queues[turn % lanes].pop(0)))
            turn += 1
    return order


def global_batches(
    length: int, lanes: int, chunk_size: int, size: int, start: int = 0
) -> list[list[int]]:
    """Positions of each global batch from `start` on, lane by lane; the last may be shorter."""
    order = delivery(length, lanes, chunk_size)[start:]
    batches = []
    while order:
        batch, order = order[:size], order[size:]
        batches.append([p for lane in range(lanes) for at, p in batch if at == lane])
    return batches


def rank_slice(batch: Sequence[int], rank: int, world: int) -> tuple[list[int], list[bool]]:
    """What one rank gets of a global batch, repeated up to the common size, and what is real."""
    n = len(batch)
    size = (n + world - 1) // world
    mine = list(batch[rank * size : (rank + 1) * size])
    valid = [True] * len(mine)
    while len(mine) < -(-n // world):
        mine.append(mine[-1] if mine else batch[-1])
        valid.append(False)
    return mine, valid
