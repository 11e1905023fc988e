"""What the server can read from one client's update: how many images of each class, and an image.

python benchmarks/leakage.py OUT.json [--smoke]
    One local step of plain SGD (FedAvg) on mini_digits; the update is what a node would send, and divided by the rate
    it is the gradient. By the last layer's bias, class k has B (p_k - g_k) images, where p_k is the mean probability of
    class k: the attacker takes it from images of another domain. With one image in the batch the gradient of a linear
    layer's weight is (gradient of its bias) x image, so a row divided by its bias's gradient is the image.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardy import config
from hardy.core.messages import Slot, Work
from hardy.runs.prepare import prepare

RATE = 0.1


def one_step(model: str, batch: int, seed: int, norm: str) -> tuple[Any, dict[str, torch.Tensor], np.ndarray]:
    """A run before its first round, the gradient that client 0's update gives away, and the rows it was made of."""
    chosen = config.parse(
        f'seed = {seed}\nmodel = "{model}"\nmethod = {{ name = "fedavg", norm = "{norm}" }}\n[data]\nclients = 1\n'
        f'limit = 200\nsource = {{ name = "mini_digits", domains = ["mail", "pen"] }}\n[training]\nsteps = 1\n'
        f'batch = {batch}\nrate = {RATE}\n[engine]\nname = "sequential"\ndevice = "cpu"\nprecision = "float32"\n'
    )
    run = prepare(chosen)
    sent = run.state.shared
    (came,) = run.engine.train(Work(round=0, rate=RATE, slots=[Slot(0, 0)], shared=sent, reported=run.state.reported))
    gradient = {name: (sent[name][0] - came.shared[name][0]) / RATE for name in run.engine.plan.trained}
    (rows,) = run.engine.batches(0, 0)
    return run, gradient, rows


def labels(batch: int, seeds: int) -> dict[str, float]:
    """The share of classes whose count is guessed exactly, and of batches of which every count is."""
    right, whole = [], []
    for seed in range(seeds):
        run, gradient, rows = one_step("tiny_cnn", batch, seed, "group")
        data = run.engine.data
        public = torch.from_numpy(data.x_train[data.clients[1].train]).float() / 255
        net = run.network_for_new_client("average")
        likely = net(public).softmax(1).mean(0)
        guess = (batch * (likely - gradient["fc.bias"])).round().clamp(min=0)
        truth = torch.bincount(torch.from_numpy(data.y_train[rows]), minlength=len(data.classes))
        right.append(float((guess == truth).float().mean()))
        whole.append(float((guess == truth).all()))
    return {"classes": float(np.mean(right)), "batches": float(np.mean(whole)), "batches_tried": seeds}


def image(seeds: int) -> dict[str, float]:
    """The largest error of a pixel, in grey levels of 255, of the image read from an update made of one."""
    errors = []
    for seed in range(seeds):
        run, gradient, rows = one_step("mlp", 1, seed, "layer")
        weight, bias = gradient["hidden1.fc.weight"], gradient["hidden1.fc.bias"]
        row = int(bias.abs().argmax())
        found = (weight[row] / bias[row]).reshape(run.engine.data.shape) * 0.5 + 0.5  # the model's own scaling undone
        truth = torch.from_numpy(run.engine.data.x_train[rows[0]]).float()
        errors.append(float((found * 255 - truth).abs().max()))
    return {"largest_error_of_255": max(errors), "images_tried": seeds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    seeds = 2 if options.smoke else 20
    found = {"labels": {str(batch): labels(batch, seeds) for batch in (1, 8, 32)}, "image": image(seeds)}
    options.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
