"""The work in Flower: a ClientApp and a ServerApp with its FedAvg, in its Ray simulation."""

import os

import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    x, y = work.client(context.node_config["partition-id"])
    model = work.net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = work.epoch(model, x, y)
    metrics = MetricRecord({"num-examples": len(y), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def summed(replies: list[RecordDict], _: str) -> MetricRecord:
    return MetricRecord({"steps": sum(reply["metrics"]["steps"] for reply in replies)})


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    run, model = work.Run(), work.net()
    rule = FedAvg(
        fraction_train=work.COHORT / work.CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=work.COHORT,
        min_available_nodes=work.CLIENTS,
        train_metrics_aggr_fn=summed,
    )
    result = rule.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=work.WARM_UP + work.ROUNDS,
        evaluate_fn=lambda round, arrays: run.lap(),  # called before the first round and after each
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    steps = sum(metrics["steps"] for metrics in result.train_metrics_clientapp.values())
    run.report(steps=steps, model=model, packages=("flwr", "ray"))


if __name__ == "__main__":
    threads = int(os.environ["OMP_NUM_THREADS"])
    run_simulation(
        server_app,
        client_app,
        work.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "log_to_driver": False},
            "client_resources": {"num_cpus": threads, "num_gpus": 0.0},  # so many threads a worker, all cores busy
        },
    )
