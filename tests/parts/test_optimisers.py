"""Client optimisers against torch's own, and their state over rounds."""

import dataclasses

import pytest
import torch

from conftest import assert_close, everything, experiment, federation, fit, net
from hardy import papers
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.dsgd import dampened
from hardy.papers.scaffold import control
from hardy.parts.optimisers import Chain, adam, adamw, chain, clip, sgd

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)
TORCH = {
    "sgd": (sgd(), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (sgd(momentum=0.9, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
    "nesterov": (sgd(momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "adam": (adam(weight_decay=0.01), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01)),
    "adamw": (adamw(weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
}


def gradients(steps, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in {"a": (3, 2), "b": (4,)}.items()}


def start():
    return {"a": torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2), "b": torch.ones(4, dtype=torch.float64)}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_of_torch(name, fused):
    optimiser, make = TORCH[name]
    if fused and not optimiser.in_place:
        pytest.skip("it has no step in place")
    rate, weights = torch.tensor(0.1, dtype=torch.float64), start()
    theirs = {n: torch.nn.Parameter(w.clone()) for n, w in weights.items()}
    oracle, state = make(theirs.values()), optimiser.init(weights, list(weights))
    for gradient in gradients(5):
        for n, p in theirs.items():
            p.grad = gradient[n].clone()
        oracle.step()
        if fused:
            optimiser.in_place(weights, gradient, state, rate, {}, {})
        else:
            change, state = optimiser.update(gradient, state, weights, weights, rate, torch.tensor(0))
            weights = {n: w + change[n] for n, w in weights.items()}
    assert_close(weights, {n: p.detach() for n, p in theirs.items()}, 1e-12)


def test_clip_is_that_of_torch():
    (gradient,) = gradients(1)
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradient.values()]
    for p, g in zip(theirs, gradient.values(), strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    clipped, _ = clip(norm=0.5).update(gradient, {}, {}, {}, torch.tensor(0.1), torch.tensor(0))
    for p, g in zip(theirs, clipped.values(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-5, atol=1e-8)
    unchanged, _ = clip(norm=100.0).update(gradient, {}, {}, {}, torch.tensor(0.1), torch.tensor(0))
    assert_close(unchanged, gradient, 0)


CHAINS = {
    "adam": adam(),
    "adamw, kept, clipped": chain(clip(norm=0.5), adamw(kept=True)),
    "nesterov, kept": sgd(momentum=0.9, nesterov=True, kept=True),
    "dampened, clipped": chain(dampened(momentum=0.5), clip(norm=1.0), sgd(weight_decay=0.01)),
}


@pytest.mark.parametrize("optimiser", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("method", [papers.fedbn, papers.fedavg, papers.local_only], ids=lambda m: m.__name__)
def test_engines_agree_and_resuming_is_exact(optimiser, method, tmp_path):
    import hardy

    made, data = method(optimiser=optimiser), federation()
    one, many = fit(made, data=data, rounds=3), fit(made, data=data, rounds=3, engine=VECTORISED)
    assert_close(everything(one), everything(many), 1e-7)  # Adam divides by moments that are nearly 0
    fit(made, data=data, rounds=2, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    resumed = hardy.resume(tmp_path / "run", method=made, model=net, data=data, quiet=True)
    assert_close(everything(one), everything(resumed), 0)


def test_state_that_is_kept_is_private_and_covers_private_tensors():
    plan = papers.fedbn(optimiser=sgd(momentum=0.9, kept=True)).bind(net, (1, 8, 8))
    for name in plan.trained:
        assert plan.placement[f"momentum.{name}"] == "private"
    born = papers.fedavg(optimiser=sgd(momentum=0.9)).bind(net, (1, 8, 8))
    assert not any(name.startswith("momentum.") for name in born.placement)


def test_dampened_moves_tensors_that_are_not_shared():
    """In version 0.1 local_only with dampened was plain local_only."""
    plain = fit(papers.local_only(), rounds=2)
    damped = fit(papers.local_only(optimiser=chain(dampened(momentum=0.5), sgd())), rounds=2)
    names = [name for name in plain.engine.store if name.endswith("weight")]
    assert any(not torch.equal(plain.engine.store[n], damped.engine.store[n]) for n in names)
    assert damped.engine.store["m.fc.weight"].abs().sum() > 0


def test_kept_momentum_differs_from_one_born_anew():
    born, kept = (
        fit(papers.fedavg(optimiser=sgd(momentum=0.9, kept=kept)), rounds=2).state.shared["fc.weight"]
        for kept in (False, True)
    )
    assert not torch.equal(born, kept)


def test_chain_flattens_and_refuses():
    assert chain(clip(norm=1.0), chain(dampened(), sgd())).links == (clip(norm=1.0), dampened(), sgd())
    assert chain(sgd()) == sgd()
    for links in ((clip(norm=1.0),), (sgd(), clip(norm=1.0)), (sgd(), adam())):
        with pytest.raises(HardyError, match="exactly one link makes the step"):
            Chain(links=links)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sgd(momentum=1.0), "momentum"),
        (lambda: sgd(nesterov=True), "no momentum, so it has no effect"),
        (lambda: sgd(kept=True), "no momentum, so it has no effect"),
        (lambda: sgd(weight_decay=-1.0), "weight_decay"),
        (lambda: adam(beta2=1.0), "beta2"),
        (lambda: clip(norm=0.0), "norm"),
        (lambda: dampened(momentum=1.0), "momentum"),
    ],
)
def test_mistakes_are_refused(make, words):
    with pytest.raises(HardyError, match=words):
        make()


def test_momentum_without_effect_is_refused():
    once = Training(rate=0.1, batch=4, steps=1)
    with pytest.raises(HardyError, match="clients take 1 local step"):
        fit(papers.fedavg(optimiser=sgd(momentum=0.9)), training=once)
    fit(papers.fedavg(optimiser=sgd(momentum=0.9, kept=True)), training=once, rounds=1)


def test_scaffold_needs_sgd():
    with pytest.raises(HardyError, match="which it is with sgd only"):
        fit(papers.scaffold(optimiser=adam()))
    with pytest.raises(HardyError, match="no rule for control"):
        fit(papers.fedavg(optimiser=chain(control(), sgd())))


def test_toml_says_the_same():
    from hardy import config

    read = config.parse("", ["optimiser.momentum=0.9", "method=scaffold"])
    assert config.method(read).optimiser == chain(control(), sgd(momentum=0.9))
    text = 'optimiser = { name = "chain", links = [{ name = "clip", norm = 1.0 }, "adamw"] }'
    chosen = config.parse(text)
    assert chosen.optimiser == chain(clip(norm=1.0), adamw())
    assert config.parse(chosen.to_toml()).optimiser == chosen.optimiser
    with pytest.raises(HardyError, match="the method given as an object has one of its own"):
        fit(papers.fedavg(), optimiser=sgd(momentum=0.9))
    assert dataclasses.replace(experiment(), optimiser=adam()).optimiser == adam()
