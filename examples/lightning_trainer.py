"""Trains on a mixture of code and prose with Lightning's Trainer; run it again to go on.

    python examples/lightning_trainer.py [--devices 2]

Kill it at any moment and give the command again, also with another number of devices: it goes on
from its last checkpoint at the very next sample. The digest at the end is of the ids of all samples
that were trained on, in order: one run gives the same as many.
"""

import argparse
import hashlib
import inspect
import os
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from zephon_torch import DataLoader
from zephon_torch.io import Dataset
from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource

CODE, PROSE = inspect.getsource(inspect).split("\n\n"), [topics[name] for name in sorted(topics)]


def tokens(record):
    data = record["text"].encode()[:65].ljust(65)
    return {"id": record["id"], "tokens": torch.tensor(list(data))}


def make_loader():
    datasets = [
        Dataset.from_samples(name, [{"id": i, "text": text} for i, text in enumerate(texts, start)])
        for name, texts, start in [("code", CODE, 0), ("prose", PROSE, 1_000_000)]
    ]
    mixture = MixtureSpec({"code": 0.7, "prose": 0.3})
    source = StaticMixtureWorkSource(datasets, mixture, shuffle_block_size=256)
    return DataLoader(source, global_batch_size=8, drop_last=True, transform=tokens)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.digest = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256)), ""

    def training_step(self, batch, batch_idx):
        ids = self.all_gather(batch["id"]).flatten().tolist()  # one rank after the other
        self.digest = hashlib.sha256(f"{self.digest}{ids}".encode()).hexdigest()
        if batch_idx % 10 == 0 and self.global_rank == 0:
            print(f"epoch {self.current_epoch} step {self.global_step}", flush=True)
        logits = self.net(batch["tokens"][:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["tokens"][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["digest"] = self.digest

    def on_load_checkpoint(self, checkpoint):
        self.digest = checkpoint["digest"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", default="runs/lightning_trainer")
    options = parser.parse_args()
    every_seven = ModelCheckpoint(options.folder, every_n_train_steps=7, save_last=True)
    trainer = Trainer(
        accelerator="cpu", devices=options.devices, max_epochs=2, callbacks=[every_seven],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, make_loader(), ckpt_path="last")  # the progress of the data is in it
    trainer.print(f"digest: {model.digest}", flush=True)
    os._exit(0)  # gloo's threads may abort a Python that is shutting down
