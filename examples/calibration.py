"""A metric of one's own: the expected calibration error on validation rows, in metrics.jsonl at every evaluation."""

from dataclasses import dataclass, replace

import torch

import hardy
from hardy.core.protocols import Metric


@dataclass(frozen=True, kw_only=True)
class Calibration(Metric):
    """Mean distance of confidence from accuracy over bins of confidence; 0 is perfect."""

    bins: int = 10

    def measure(self, context):
        def client(net, private, batch, key):
            p, guess = net(batch.x, branch=context.branch).softmax(-1).max(-1)
            return {"confidence": p, "right": (guess == batch.y).to(p)}

        found = {name: values.flatten() for name, values in context.each(client).items()}
        bins = (found["confidence"] * self.bins).long().clamp_max(self.bins - 1)
        gap = found["right"] - found["confidence"]
        error = sum(gap[bins == b].sum().abs() for b in range(self.bins)) / len(gap)
        return {"calibration_error": float(torch.as_tensor(error))}


if __name__ == "__main__":
    demo = hardy.read("demo", ["rounds=3"])
    run = hardy.fit(replace(demo, evaluation=replace(demo.evaluation, metrics=(Calibration(),))), out=None)
    print(f"{run.last_line['calibration_error']:.3f}")
