"""Make ``arrow/``: ``pip install polars==2.1.0 arro3-core==0.9.1 arro3-io==0.9.1``, then run this.

Layouts that pyarrow does not write: Polars has its schema right behind the magic, without marker
and length; arrow-rs (behind arro3) pads what stands before the first message, and has lists of
views of text in Parquet.
"""

from __future__ import annotations

from pathlib import Path

import arro3.core
import arro3.io
import polars

FOLDER = Path(__file__).parent / "arrow"
LONG = "a text of more than twelve bytes"
COLUMNS = {
    "id": [0, 1, 2, 3, 4],
    "text": ["a", None, "ö", LONG, ""],
    "tags": [["a", LONG], [], None, [""], ["b"]],
}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    frame = polars.DataFrame(COLUMNS)
    frame.write_ipc(FOLDER / "polars.arrow", record_batch_size=2)
    frame.write_ipc(FOLDER / "polars-zstd.arrow", compression="zstd")
    frame.write_ipc_stream(FOLDER / "polars.arrows", compression="lz4")
    old = polars.CompatLevel.oldest()
    table = arro3.core.Table.from_arrow(frame.to_arrow(compat_level=old))
    views = arro3.core.Table.from_arrow(frame.to_arrow(compat_level=polars.CompatLevel.newest()))
    arro3.io.write_parquet(views, FOLDER / "arrow-rs.parquet")
    arro3.io.write_ipc(table, FOLDER / "arrow-rs.arrow", compression=None)
    arro3.io.write_ipc_stream(table, FOLDER / "arrow-rs.arrows", compression="lz4")


if __name__ == "__main__":
    main()
