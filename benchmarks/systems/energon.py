"""NVIDIA's Megatron Energon over JSON lines, one file a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.throughput import BATCH_SIZE

BUFFER, SEQUENCE = 1000, 100


class Energon(System):
    label = "Megatron Energon"
    requirement = "megatron-energon"
    packages = ("megatron-energon",)
    modules = ("torch", "megatron.energon")
    note = "Sequences of at most 100 samples, shuffled in a buffer of 1,000; crude JSON lines."
    text_engines = ("inline", "2 workers")
    mixture_engines = ("inline",)
    token_engines = ()

    def prepare(self, data: Data, folder: Path) -> None:
        from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

        folder.mkdir(parents=True, exist_ok=True)
        for corpus in ("web", "code"):
            path = folder / f"{corpus}.jsonl"
            path.write_bytes(b"".join(shard.read_bytes() for shard in data.shards(corpus)))
            CrudeJsonlDatasetFactory.prepare_dataset(path)
        for num_datasets in (1, 2):
            parts = [
                f"      - {{weight: {weight}, path: ./{name}.jsonl}}\n"
                for name, weight in data.mixture(num_datasets).items()
            ]
            (folder / f"mixture-{num_datasets}.yaml").write_text(
                "__module__: megatron.energon\n__class__: MetadatasetV2\n"
                f"splits:\n  train:\n    blend:\n{''.join(parts)}"
            )

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        from megatron.energon import WorkerConfig, get_loader, get_train_dataset

        dataset = get_train_dataset(
            folder / f"mixture-{variant['datasets']}.yaml",
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers(variant)),
            batch_size=BATCH_SIZE,
            shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=SEQUENCE,
            task_encoder=_encoder(),
        )
        found: Iterable[Any] = get_loader(dataset)
        return found


def _encoder() -> Any:
    from megatron.energon import Cooker, DefaultTaskEncoder, stateless

    class Documents(DefaultTaskEncoder):
        cookers = [Cooker(stateless(same))]  # noqa: RUF012

        def batch(self, samples: list[Any]) -> Any:
            return [sample["json"] for sample in samples]

    return Documents()


ADAPTER = Energon()
