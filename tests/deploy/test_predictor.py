"""The predictor is an ordinary module, and the network that was evaluated."""

import warnings

import numpy as np
import pytest
import torch
from torch.func import functional_call

import hardy
from conftest import fit
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.config import EvaluationChoice
from hardy.core.layers import calling
from hardy.deploy import OnnxPredictor
from hardy.evaluation.serving import serve
from hardy.parts.norms import batch

X = torch.rand(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ADVERSARIAL = EvaluationChoice(attack_branch="adversarial", predict_branch="adversarial")


@pytest.fixture(scope="module")
def dual():
    """A run whose two branches disagree, judged by the adversarial one."""
    run = fit(
        papers.split_mix_dat(width=0.25, attack=pgd(epsilon=0.5, step=0.3, steps=2)), rounds=1, evaluation=ADVERSARIAL
    )
    clean, adversarial = accuracy(run.customise(robustness=0.0), run), accuracy(run.customise(robustness=1.0), run)
    assert clean != adversarial  # else nothing here could fail
    return run


def accuracy(network, run) -> list[float]:
    """Of each client on its test rows, by hand."""
    data = run.engine.data
    found = []
    for client in data.clients:
        x = torch.from_numpy(data.x_test[client.test]) / 255
        logits = network(x.double()).detach() if isinstance(network, torch.nn.Module) else network(x.numpy())
        found.append(float((np.asarray(logits).argmax(1) == data.y_test[client.test]).mean()))
    return found


def test_gradients_reach_the_input_and_the_parameters(dual):
    served = dual.customise(width=0.5, robustness=0.3)
    x = X.clone().requires_grad_()
    served(x).logsumexp(1).sum().backward()
    bases = serve(dual.engine.plan, dual.state.shared, {}, rounds=dual.state.round, width=0.5).bases(0)

    def by_hand(x, bases):
        with calling(branch="clean", statistics="running", key=None, robustness=0.3):
            answers = [functional_call(dual.engine.plan.model, held, (x,)) for held in bases]
        return torch.stack(answers).mean(0).logsumexp(1).sum()

    into_x, into_bases = torch.func.grad(by_hand, argnums=(0, 1))(X, bases)
    torch.testing.assert_close(x.grad, into_x)
    for base, wanted in zip(served.bases, into_bases, strict=True):
        for name, value in base.named_parameters():
            torch.testing.assert_close(value.grad, wanted[name])
    assert torch.autograd.gradcheck(served, X[:1].clone().requires_grad_(), fast_mode=True)


def test_state_dict_mode_and_precision_are_a_modules(dual):
    served, other = dual.customise(width=0.5), dual.customise(width=0.5)
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
    assert not torch.equal(other(X), served(X))
    other.load_state_dict(served.state_dict())
    assert torch.equal(other(X), served(X))
    before = {name: value.clone() for name, value in served.state_dict().items()}
    assert torch.equal(served.train()(X), served.eval()(X))
    assert all(torch.equal(value, before[name]) for name, value in served.state_dict().items())
    single = served.to(torch.float32)
    assert single.dtype is single(X).dtype is torch.float32
    assert single.customise(width=1.0)(X).dtype is torch.float32  # bases that were away come back alike
    assert {value.dtype for value in single.parameters()} == {torch.float32}


def test_other_tools_take_it_as_it_is(dual):
    foolbox = pytest.importorskip("foolbox", reason="foolbox is an extra (oracle)")
    served, data = dual.customise().eval().float(), dual.engine.data
    x, y = torch.from_numpy(data.x_test[:20]) / 255, torch.from_numpy(data.y_test[:20])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attacked = foolbox.PyTorchModel(served, bounds=(0, 1), device="cpu")
        _, adversarial, fooled = foolbox.attacks.LinfPGD(steps=10)(attacked, x, y, epsilons=0.3)
    assert (adversarial - x).abs().max() <= 0.3 + 1e-6
    assert fooled.float().mean() > (served(x).argmax(1) != y).float().mean()


def test_the_network_that_is_served_has_the_accuracy_of_the_summary(dual):
    assert dual.summary()["standard_accuracy"]["by_client"] == accuracy(dual.customise(), dual)
    assert dual.customise().branch == "adversarial"
    plain = fit(papers.fedbn(), rounds=2)
    for client, found in enumerate(plain.summary()["standard_accuracy"]["by_client"]):
        assert accuracy(plain.customise(client=client), plain)[client] == found
    recomputed = fit(papers.fedavg(norm=batch(inference_statistics="recomputed")), rounds=2)
    for client, found in enumerate(recomputed.summary()["standard_accuracy"]["by_client"]):
        assert accuracy(recomputed.customise(client=client), recomputed)[client] == found


def test_the_network_for_a_new_client_answers_with_the_branch_of_the_evaluation(dual):
    made = dual.network_for_new_client("average")
    torch.testing.assert_close(made(X), dual.customise()(X))
    assert not torch.allclose(made(X), made(X, branch="clean"))


def test_the_export_has_the_accuracy_of_the_summary(dual, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is an extra (export)")
    pytest.importorskip("onnxruntime", reason="onnxruntime is an extra (export)")
    path = dual.export(tmp_path / "net.onnx")
    served = OnnxPredictor(path)
    assert (served.manifest["branch"], served.manifest["robustness"]) == ("adversarial", 1.0)
    assert accuracy(served, dual) == dual.summary()["standard_accuracy"]["by_client"]
    plain = fit(papers.fedavg(), rounds=2)
    assert accuracy(OnnxPredictor(plain.export(tmp_path / "plain.onnx")), plain) == [
        *plain.summary()["standard_accuracy"]["by_client"]
    ]
    assert hardy.evaluate(plain, quiet=True)["standard_accuracy"]["by_client"] == accuracy(plain.customise(), plain)


def test_a_change_of_width_moves_no_base_that_was_there_before():
    predictor = fit(papers.split_mix(width=0.25), rounds=1).customise(width=1.0)
    every = list(predictor.bases)
    predictor.customise(width=0.5).release()
    assert [base is own for base, own in zip(predictor.bases, every, strict=False)] == [True, True]
    assert list(predictor.customise(width=1.0).bases) == every
