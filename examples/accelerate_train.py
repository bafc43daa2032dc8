"""A language model under Accelerate, resumed at the very next sample.

    python examples/accelerate_train.py
    accelerate launch --num_processes 2 --cpu examples/accelerate_train.py

Stop it at any moment and start it again, with as many processes as you like: it goes on from the
last checkpoint, with the losses of a run that was never stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from byte_transformer import ByteTransformer
from text_windows import LENGTH, held_out, make_source

from zephon_torch import DataLoader

GLOBAL_BATCH_SIZE = 16  # over all processes, so that a step has the same samples on any number
SAVE_EVERY = 10  # optimizer steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("accelerate_run"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = ByteTransformer(width=64, num_layers=2, num_heads=4, context=LENGTH - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_source(), global_batch_size=GLOBAL_BATCH_SIZE)
    evaluation = DataLoader(held_out(), batch_size=1)
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)

    saved = sorted(options.output_dir.glob("step-*[0-9]"))
    step = int(saved[-1].name.removeprefix("step-")) if saved else 0
    if saved:
        accelerator.load_state(str(saved[-1]))  # the loader too: nothing is to be skipped after it
        # a process that the saved run did not have finds no accumulation step of its own there
        accelerator.step = broadcast_object_list([accelerator.step])[0]
    while step < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch["input_ids"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step} | loss {accelerator.gather(loss).mean():.4f}")
                if step % SAVE_EVERY == 0:
                    save(accelerator, options.output_dir / f"step-{step:06d}")
            if step == options.steps:
                break
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(model(b["input_ids"])[None]) for b in evaluation]
    losses = torch.cat(found)  # of each row once, also where it takes padding to share them out
    accelerator.print(f"evaluation | {len(losses)} rows | loss {losses.mean():.4f}")
    accelerator.end_training()


def save(accelerator: Accelerator, folder: Path) -> None:
    """Save all; a folder of the final name is whole."""
    accelerator.save_state(f"{folder}.partial")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(f"{folder}.partial").replace(folder)


if __name__ == "__main__":
    main()
