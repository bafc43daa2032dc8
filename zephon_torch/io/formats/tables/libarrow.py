"""The optional package behind the formats of tables: importing this raises where it is missing."""

from __future__ import annotations

from typing import Any

from zephon_torch.support.extras import require

pa: Any = require("pyarrow", "parquet", "reading Parquet and Arrow files")
ipc: Any = require("pyarrow.ipc", "parquet", "reading Arrow files")
types: Any = require("pyarrow.types", "parquet", "reading Parquet and Arrow files")
