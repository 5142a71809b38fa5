"""A tiny Lightning training: lightning_trainer.py OUTPUT_DIR STOP_AFTER. Resumes from last.ckpt, if there is one.

Twelve steps in all, a checkpoint every second one, the best two kept, last.ckpt a link. Dies after STOP_AFTER steps.
Prints a digest of the weights at the end.
"""

import hashlib
import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

output_dir, stop_after = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
lightning.seed_everything(7, verbose=False)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("progress", float(self.global_step))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Preempted(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == stop_after:
            os._exit(42)


generator = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(96, 64, generator=generator), torch.randn(96, 1, generator=generator)
)
loader = torch.utils.data.DataLoader(data, batch_size=8)
saving = ModelCheckpoint(
    output_dir, every_n_train_steps=2, save_top_k=2, monitor="progress", mode="max", save_last="link"
)
trainer = lightning.Trainer(
    max_steps=12,
    accelerator="cpu",
    logger=False,
    callbacks=[saving, Preempted()],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=output_dir,
)
last = os.path.join(output_dir, "last.ckpt")
print("resumes from", os.readlink(last) if os.path.lexists(last) else None, flush=True)
model = Model()
trainer.fit(model, loader, ckpt_path=last if os.path.exists(last) else None)
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
print("weights", digest.hexdigest())
