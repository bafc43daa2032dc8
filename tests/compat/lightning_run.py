"""Trains under Lightning's Trainer and Fabric and prints what happened as JSON lines.

Usage: lightning_run.py REQUEST ...

A request is a JSON object: the name of a function of this file as "run", and its arguments. `train`
and `fabric` leave checkpoints in a folder, each from after a known number of batches; `resumes` and
`fabric_resumes` go on from them, from each with new objects.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from zephon_torch import DataLoader, DataProgress, StaticMixtureWorkSource, bind
from zephon_torch.io import Dataset

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ON_CPUS = {"accelerator": "cpu", "devices": WORLD, "strategy": "ddp" if WORLD > 1 else "auto"}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def data(num: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"x": torch.tensor([float(i)]), "id": start + i} for i in range(num)]


def make_loader(num_workers: int = 0, endless: bool = False) -> DataLoader:
    if endless:  # it has no length, so Lightning takes one batch ahead
        dataset = Dataset.from_torch("a", data(23))
        options = {"exhausted_policy": "repeat", "shuffle_block_size": "global", "seed": 5}
        loader = DataLoader(StaticMixtureWorkSource([dataset], {"a": 1}, **options), 4)
        loader.behind = 1
        return loader
    return DataLoader(data(23), global_batch_size=4, shuffle=True, seed=5, num_workers=num_workers)


class Model(LightningModule):
    """Notes the ids of the real samples of each global batch."""

    def __init__(
        self, num_workers: int = 0, endless: bool = False, cycle: bool = False, own: bool = False
    ) -> None:
        super().__init__()
        self.cycle = cycle
        if own:
            self.data_progress = DataProgress()
        self.layer = torch.nn.Linear(1, 1)
        self.loader = make_loader(num_workers, endless)
        self.evaluation = DataLoader(data(7, 100), batch_size=4 // WORLD)
        self.trained: list[list[int]] = []
        self.evaluated: list[list[int]] = []
        self.validations: list[tuple[int, list[int]]] = []
        self.after = 0

    def real(self, ids: torch.Tensor, valid: torch.Tensor | None) -> list[int]:
        assert valid is not None
        return [int(i) for i in self.all_gather(ids)[self.all_gather(valid)].tolist()]

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.trained.append(self.real(batch["id"], self.loader.valid))
        return self.layer(batch["x"]).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.evaluated.append(self.real(batch["id"], self.evaluation.valid))

    def on_validation_epoch_end(self) -> None:
        seen = [i for ids in self.evaluated for i in ids]
        self.validations.append((len(self.trained), seen))
        self.evaluated = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001)
        if not self.cycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, steps)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["after"] = len(self.trained) + self.after

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.after = checkpoint["after"]


class FromHook(Model):
    """Gives its loader as Lightning modules do."""

    def train_dataloader(self) -> DataLoader:
        self.loader = make_loader(1)
        return self.loader


class SaveAtValidationEnd(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"validated-{trainer.global_step}.ckpt")


def saving_everywhere(folder: Path) -> list[Callback]:
    """After each optimizer step, after each validation, after each epoch."""
    every: dict[str, Any] = {"dirpath": folder, "save_top_k": -1}
    return [
        ModelCheckpoint(**every, filename="{step}", every_n_train_steps=1),
        ModelCheckpoint(
            **every, filename="{epoch}", every_n_epochs=1, save_on_train_epoch_end=True
        ),
        SaveAtValidationEnd(folder),
    ]


def train(
    folder: str | None = None, ckpt: Path | None = None, bound: bool = False, hook: bool = False,
    num_workers: int = 0, endless: bool = False, cycle: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    model = (FromHook if hook else Model)(num_workers, endless, cycle, own=bound and cycle)
    if bound:
        bind(model, model.loader)
    callbacks = [] if folder is None else saving_everywhere(Path(folder))
    trainer = Trainer(
        **ON_CPUS, **QUIET, **options, callbacks=callbacks, enable_checkpointing=bool(callbacks)
    )
    trainer.fit(model, None if hook else model.loader, model.evaluation, ckpt_path=ckpt)
    return {
        "after": model.after,
        "trained": model.trained,
        "validations": model.validations,
        "steps": trainer.global_step,
        "kept": trainer.train_dataloader is model.loader,
    }


def resumes(folder: str, names: str = "*", **options: Any) -> dict[str, Any]:
    checkpoints = sorted(Path(folder).glob(f"{names}.ckpt"))
    return {checkpoint.stem: train(ckpt=checkpoint, **options) for checkpoint in checkpoints}


def loaded_without_a_loader(folder: str) -> dict[str, Any]:
    """A checkpoint of a bound module, loaded for inference: by the class that has the child."""
    checkpoint = sorted(Path(folder).glob("*.ckpt"))[0]
    model = Model.load_from_checkpoint(checkpoint, own=True)
    other = Model.load_from_checkpoint(checkpoint, own=False, strict=False)
    return {"loaded": [float(one.layer.weight.sum()) for one in (model, other)]}


def refused_and_predicted() -> dict[str, Any]:
    class Predicting(Model):
        def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> list[int]:
            self.trained.append(self.real(batch["id"], self.loader.valid))
            return []

        def predict_dataloader(self) -> Any:
            return iter(self.loader)

    errors, model = [], Predicting(0)
    for attempt in (
        lambda: Trainer(**ON_CPUS, **QUIET).predict(model, model.loader),
        lambda: Trainer(**ON_CPUS, **QUIET, overfit_batches=2).fit(model, model.loader),
    ):
        try:
            attempt()
        except ValueError as error:
            errors.append(str(error))
    Trainer(**ON_CPUS, **QUIET).predict(model)
    return {"errors": errors, "predicted": model.trained}


def fabric(
    folder: str | None = None, ckpt: Path | None = None, bound: bool = False
) -> dict[str, Any]:
    fabric = Fabric(**ON_CPUS)
    fabric.launch()
    ours, model = make_loader(), torch.nn.Linear(1, 1)
    if bound:
        bind(model, ours)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.001))
    loader = fabric.setup_dataloaders(ours)
    refused = [not can_be_bound(*pair) for pair in ((model, ours), (torch.nn.Linear(1, 1), loader))]
    state = {"model": model, "optimizer": optimizer, "loader": loader, "after": 0}
    if ckpt is not None:
        fabric.load(ckpt, state)
    after, trained = state["after"], []
    while ours.epoch < 3:
        for batch in loader:
            fabric.backward(model(batch["x"]).sum())
            optimizer.step()
            optimizer.zero_grad()
            valid = fabric.all_gather(ours.valid)
            trained.append(fabric.all_gather(batch["id"])[valid].tolist())
            if folder is not None:
                fabric.save(Path(folder, f"{len(trained)}.ckpt"), state | {"after": len(trained)})
    return {
        "after": after,
        "trained": trained,
        "refused": refused,
        "stale": hasattr(loader, "valid"),
    }


def can_be_bound(model: torch.nn.Module, loader: Any) -> bool:
    try:
        bind(model, loader, name="another")
    except ValueError as error:
        assert "before it is wrapped" in str(error)
        return False
    return True


def fabric_resumes(folder: str, names: str = "*", **options: Any) -> dict[str, Any]:
    checkpoints = sorted(Path(folder).glob(f"{names}.ckpt"))
    return {checkpoint.stem: fabric(ckpt=checkpoint, **options) for checkpoint in checkpoints}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    runs = {
        f.__name__: f
        for f in (
            train, resumes, loaded_without_a_loader, refused_and_predicted, fabric, fabric_resumes
        )
    }  # fmt: skip
    for line in sys.argv[1:]:
        request = json.loads(line)
        warnings.simplefilter("ignore")
        if not request.pop("may_warn", False):
            warnings.filterwarnings("error", message=".*the checkpoint wins")
        result = runs[request.pop("run")](**request)
        if os.environ.get("RANK", "0") == "0":
            print("RESULT", json.dumps(result), flush=True)
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
