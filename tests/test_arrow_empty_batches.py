"""A batch whose damaged header claims no rows is no empty batch."""

from __future__ import annotations

from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")

from zephon_torch.errors import DatasetError  # noqa: E402
from zephon_torch.io import Dataset  # noqa: E402


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_no_bit_of_a_header_makes_rows_disappear(kind: str, tmp_path: Path) -> None:
    table = pa.table({"id": range(20)})
    path = tmp_path / "x.arrow"
    with getattr(pa.ipc, f"new_{kind}")(path, table.schema) as writer:
        writer.write_table(table, 10)
    whole = path.read_bytes()
    start = whole.rindex(b"\xff\xff\xff\xff", 0, whole.rindex((19).to_bytes(8, "little")))
    header = range(start + 8, start + 8 + int.from_bytes(whole[start + 4 : start + 8], "little"))
    num_refused = 0
    for at in header:
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                num_rows = len(Dataset.from_path("x", path))
            except DatasetError:
                num_refused += 1
            else:
                assert num_rows >= 20 or num_rows == 10 + (10 ^ 1 << bit), (at, bit, num_rows)
                assert num_rows != 10, (at, bit)
    assert num_refused > 100
    writer = getattr(pa.ipc, f"new_{kind}")(path, table.schema)
    for part in (table[:10], table[:0], table[10:]):
        for batch in part.to_batches() or [pa.record_batch({"id": pa.array([], pa.int64())})]:
            writer.write_batch(batch)
    writer.close()
    assert len(Dataset.from_path("x", path)) == 20, "batches that are empty are read"
