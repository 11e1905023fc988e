"""A metric of one's own: a function of logits and labels. It is measured for every client, clean and under attack."""

from dataclasses import replace

import hardy


@hardy.metric
def top_two(logits, labels):
    """Share of rows whose label is among the two highest logits."""
    return (logits.topk(2).indices == labels[:, None]).any(1).double().mean()


if __name__ == "__main__":
    demo = hardy.read("demo", ["rounds=3", 'evaluation.metrics=["top_two", "auroc"]'])
    run = hardy.fit(replace(demo, evaluation=replace(demo.evaluation, threats=("fgsm",))), out=None)
    for name, figures in run.summary()["metrics"].items():
        attacked = run.summary()["robust_metrics"]["fgsm"][name]
        print(f"{name}: {figures['mean']:.3f}, worst client {figures['worst_client']:.3f}, fgsm {attacked['mean']:.3f}")
