"""A tiny Hugging Face training: hf_trainer.py OUTPUT_DIR STOP_AFTER. Resumes from the last checkpoint, if there is one.

Twelve steps in all, a checkpoint every second one, two kept. Dies like a preempted machine after STOP_AFTER steps.
Prints a digest of the weights at the end.
"""

import hashlib
import os
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

output_dir, stop_after = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 500, (16,), generator=generator), "labels": torch.tensor(index % 2)}


class Preempted(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == stop_after:
            os._exit(42)


config = BertConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
    max_position_embeddings=32,
)  # fmt: skip
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    output_dir=output_dir,
    max_steps=12,
    save_steps=2,
    save_total_limit=2,
    logging_steps=1,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    use_cpu=True,
    seed=7,
    data_seed=7,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), callbacks=[Preempted()])
last = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
print("resumes from", os.path.basename(last) if last else None, flush=True)
trainer.train(resume_from_checkpoint=last)
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
print("weights", digest.hexdigest())
