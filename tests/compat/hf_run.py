"""Trains and evaluates under transformers' Trainer and prints what happened as JSON lines.

Usage: hf_run.py REQUEST ..., each the JSON of keyword arguments of a function below.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zephon_torch

NUM = 42


class Crash(Exception):
    """A run that ends here."""


class CrashAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.step:
            raise Crash


def sample(number: int) -> dict[str, torch.Tensor]:
    tokens = torch.tensor([number, number + 1, number + 2])
    return {"input_ids": tokens, "labels": tokens}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1))


def gathered(column: torch.Tensor) -> list[int]:
    if not dist.is_initialized():
        return column.tolist()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, column.tolist())
    return [number for part in parts for number in part]


class Recording(Trainer):
    """Trains on a loader and notes each batch's samples, in the order of ranks, by step."""

    def __init__(self, loader: Any, model: Any, args: Any, **rest: Any) -> None:
        self.loader, self.seen = loader, []
        super().__init__(model, args, **rest)

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.loader)

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        self.seen.append([self.state.global_step, gathered(inputs["input_ids"][:, 0])])
        return super().training_step(model, inputs, *rest)


def train(
    folder: str,
    batch_size: int = 0,
    accumulate: int = 3,
    save_steps: int = 1000,
    crash: int = 0,
    resume: bool = False,
    is_bound: bool = True,
    is_skippable: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2,
        gradient_accumulation_steps=accumulate, save_steps=save_steps, **options,
    )  # fmt: skip
    data = [sample(number) for number in range(NUM)]
    batch_size = batch_size or 4 // args.world_size
    loader = zephon_torch.DataLoader(data, batch_size, shuffle=True, num_workers=num_workers)
    model, error = make_model(), ""
    if is_bound:
        zephon_torch.bind(model, loader)
    given = zephon_torch.Skippable(loader) if is_skippable else loader
    trainer = Recording(given, model, args, callbacks=[CrashAt(crash)] if crash else [])
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (Crash, zephon_torch.ZephonError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    loader.close()
    return {
        "seen": trainer.seen,
        "error": error,
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "place": [loader.epoch, loader.delivered],
        "weights": [p.double().sum().item() for p in model.parameters()],
    }


class Evaluating(Trainer):
    """Evaluates 21 samples on a loader that is, or is not, prepared."""

    is_prepared = True

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = zephon_torch.DataLoader([sample(number) for number in range(21)], batch_size=4)
        return self.accelerator.prepare(loader) if self.is_prepared else loader


def evaluate(folder: str, is_prepared: bool = True) -> dict[str, Any]:
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=4
    )
    seen: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.extend(prediction.label_ids[:, 0].tolist())
        return {}

    trainer = Evaluating(make_model(), args, compute_metrics=metrics)
    trainer.is_prepared = is_prepared
    trainer.evaluate()
    return {"seen": seen}


if __name__ == "__main__":
    for line in sys.argv[1:]:
        request = json.loads(line)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = globals()[request.pop("do", "train")](**request)
        result["warnings"] = [str(warning.message) for warning in caught]
        if int(os.environ.get("RANK", "0")) == 0:
            print("RESULT", json.dumps(result), flush=True)
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
