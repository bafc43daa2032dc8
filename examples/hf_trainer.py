"""A language model under transformers' Trainer, resumed at the very next sample.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

Stop it at any moment and start it again, with as many processes as you like: it goes on from the
last checkpoint, with the losses of a run that was never stopped. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from text_windows import held_out, make_source
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from zephon_torch import DataLoader, Skippable, bind

GLOBAL_BATCH_SIZE = 16  # over all processes, so that a step has the same samples on any number


class MixtureTrainer(Trainer):
    """Trains on a loader of its own, and evaluates on what no run trains on."""

    def __init__(self, loader: DataLoader, *args: Any) -> None:
        self.loader = loader
        super().__init__(*args)

    def get_train_dataloader(self) -> Any:
        """When it resumes, the Trainer skips the batches that it has trained on."""
        return self.accelerator.prepare(Skippable(self.loader))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Prepared, so that samples which fill the last batch are not counted twice."""
        return self.accelerator.prepare(DataLoader(held_out(), self.args.eval_batch_size))


def make_model() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", default="hf_trainer_run")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        options.output_dir,
        max_steps=options.steps,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        save_steps=10,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    args.per_device_train_batch_size = GLOBAL_BATCH_SIZE // args.world_size  # only for its log
    loader = DataLoader(make_source(), global_batch_size=GLOBAL_BATCH_SIZE)
    model = make_model()
    bind(model, loader)  # checkpoints carry the progress, and are checked against the data
    trainer = MixtureTrainer(loader, model, args)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output_dir))
    trainer.evaluate()
    loader.close()


if __name__ == "__main__":
    main()
