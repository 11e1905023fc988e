"""The work in pfl-research: FederatedAveraging on the simulated backend; under torchrun, one cohort for all processes.

pfl walks through a client's batches in a fixed order; everybody else shuffles.
"""

import numpy as np
import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """The network in the shape pfl asks for; counts the steps of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = work.net(), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}


class Laps(TrainingProcessCallback):
    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        run.lap()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        run.lap()
        return False, Metrics()


run = work.Run()
np.random.seed(0)  # noqa: NPY002 - pfl draws from numpy's global generator; its processes must agree
torch.manual_seed(0)
users = {number: PyTorchTensorDataset(work.client(number)) for number in range(work.CLIENTS)}
data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
net = Net()
rounds = work.WARM_UP + work.ROUNDS
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=work.COHORT,
        val_cohort_size=None,
    ),
    SimulatedBackend(training_data=data, val_data=data),
    PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.RATE, local_batch_size=work.BATCH),
    callbacks=[Laps()],
    send_metrics_to_platform=False,
)
steps = int(distributed.all_reduce([torch.tensor(float(net.steps))])[0])
if distributed.global_rank == 0:
    run.report(steps=steps, model=net, packages=("pfl",))
if torch.distributed.is_initialized():  # a process that just ends may abort its neighbour
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
