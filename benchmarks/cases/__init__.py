"""What is measured: each module has NAME, variants(is_short) and measure(variant, work_dir).

`variants` lists dicts that JSON can hold, each with "system", the name of an adapter, whose
environment the job runs in. `measure` runs in a fresh process and returns metrics, each named with
its unit. TURNS, if a module has it, is how many turns are enough.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def load() -> dict[str, ModuleType]:
    """Return the modules of all cases by their names."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.NAME: module for module in modules}
