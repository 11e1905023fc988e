"""FedRobust: both players move as Algorithm 1 says, shifts stay at home, and the theory's figures are right."""

import dataclasses
import json
from itertools import pairwise

import pytest
import torch
from torch.func import grad

import hardy
from conftest import SHAPE, assert_close, everything, federation, fit, net
from hardy import config, papers
from hardy.config import EvaluationChoice
from hardy.core import tensors
from hardy.core.client import apply_gradients, compute_gradients, init_client
from hardy.core.net import Net
from hardy.core.protocols import Batch
from hardy.core.training import Training
from hardy.engines import ENGINES, EngineChoice
from hardy.errors import HardyError
from hardy.papers.fedavg import proximal
from hardy.papers.fedbn import local
from hardy.papers.fedrobust import Structure, primal_gap, shifted
from hardy.papers.flra_theory import broken, lipschitz, probe, spectral_norm, wasserstein_bound
from hardy.parts.norms import absent
from hardy.parts.objectives import cross_entropy
from hardy.report.compare import write_comparison
from hardy.report.stored_run import read_run
from hardy.runs.api import evaluate

STRUCTURES = Structure.__args__
PLAIN = Training(rate=0.1, batch=4)
WHOLE = Training(rate=0.1, batch=100)


def one_client(objective, shape=SHAPE, seed=0):
    """(plan, state, batch, f): a client in float64 with some shift already learnt; f(w, ψ) as in equation 5."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plan = papers.fedavg(norm=absent(), objective=objective).bind(net, shape)
    plan.model.double()
    first = init_client(
        plan, plan.start, {n: t for n, t in plan.start.items() if n.startswith("shift.")}, torch.ones(3)
    )
    trained = {n: t.double() for n, t in first.trained.items()}
    private = {n: 0.02 * torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in first.private.items()}
    x = torch.rand(5, *shape, generator=draw, dtype=torch.float64)
    batch = Batch(x, torch.arange(5) % 3, torch.ones(3))

    def f(w, psi):
        return objective.loss(Net(plan.model, w, {}), psi, batch, torch.tensor(1)) - objective.price(psi)

    return plan, first._replace(trained=trained, private=private), batch, f


# Algorithm 1


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_step_moves_both_players_along_the_gradient_of_f(structure):
    """Simultaneous descent on w and ascent on (Λ, δ), from one point, by central differences of f."""
    steps = {"shift.matrix": 0.03, "shift.offset": 0.2}
    objective = shifted(structure=structure, step=0.03, offset_step=0.2, multiplier=5.0, offset_multiplier=0.5)
    plan, state, batch, f = one_client(objective)
    both = state._replace(**{k: tensors.copies(getattr(state, k)) for k in ("trained", "private")})
    rate = torch.tensor(0.1, dtype=torch.float64)
    found = compute_gradients(plan, objective, {}, both, batch, torch.tensor(1), rate)
    after = apply_gradients(plan.method.optimiser, objective, both, found, rate)
    torch.testing.assert_close(found.loss, f(state.trained, state.private) + objective.price(state.private))
    draw = torch.Generator().manual_seed(7)
    for name, value in {**state.trained, **state.private}.items():
        way = torch.randn(value.shape, generator=draw, dtype=torch.float64)
        above, below = ({name: value + sign * 1e-6 * way} for sign in (1, -1))
        if name in state.trained:
            rise = f(state.trained | above, state.private) - f(state.trained | below, state.private)
            moved = (after.trained[name] - value) / -0.1
        else:
            rise = f(state.trained, state.private | above) - f(state.trained, state.private | below)
            moved = (after.private[name] - value) / steps[name]
        torch.testing.assert_close((moved * way).sum(), rise / 2e-6, rtol=1e-5, atol=1e-8)


def matrix_of(objective, private, shape):
    """The d x d matrix Λ − I that a structure stands for."""
    basis = torch.eye(torch.zeros(shape).numel(), dtype=torch.float64).view(-1, *shape)
    linear = {**private, "shift.offset": torch.zeros_like(private["shift.offset"])}
    return (objective.shift(linear, basis) - basis).flatten(1)


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "identity"])
def test_a_structure_is_the_full_matrix_kept_to_a_subspace(structure):
    shape = (3, 8, 8)
    objective = shifted(structure=structure)
    draw = torch.Generator().manual_seed(0)
    private = {
        n: torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in objective.private(shape, 4).items()
    }
    matrix = matrix_of(objective, private, shape)
    length, _ = objective.lengths(private)
    torch.testing.assert_close(matrix.square().sum(), length)  # orthonormal coordinates
    x = torch.rand(4, *shape, generator=draw, dtype=torch.float64)
    expected = x.flatten(1) @ (torch.eye(192, dtype=torch.float64) + matrix) + private["shift.offset"].flatten()
    torch.testing.assert_close(objective.shift(private, x).flatten(1), expected)
    # its ascent is the full ascent's part within the subspace: what is left out is orthogonal to all it holds
    target = torch.randn(4, *shape, generator=draw, dtype=torch.float64)
    slope = grad(lambda p: (objective.shift(p, x) * target).sum())(private)
    taken = matrix_of(objective, slope, shape)
    full = x.flatten(1).T @ target.flatten(1)
    assert abs(((full - taken) * matrix).sum()) < 1e-9 * full.norm() * matrix.norm()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_about_a_centre_images_are_shifted_as_if_scaled_to_both_sides_of_it(structure):
    shape, about = (3, 8, 8), shifted(structure=structure, centre=0.5)
    draw = torch.Generator().manual_seed(0)
    private = {n: torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in about.private(shape, 4).items()}
    x = torch.rand(4, *shape, generator=draw, dtype=torch.float64)
    twice = {**private, "shift.offset": 2 * private["shift.offset"]}  # a pixel is half of a scaled one
    scaled = shifted(structure=structure).shift(twice, 2 * x - 1)
    torch.testing.assert_close(2 * about.shift(private, x) - 1, scaled)


def test_without_ascent_it_is_fedavg_bit_for_bit():
    plain = fit(papers.fedavg())
    for structure in STRUCTURES:
        assert_close(fit(papers.fedrobust(structure=structure, step=0.0)).state.shared, plain.state.shared, 0)


def test_an_infinite_multiplier_is_fedavg():
    """λ to infinity, with the step 1/2λ that Theorem 2 asks for (L₂ ≥ 2λ)."""
    plain = fit(papers.fedavg())
    gaps = []
    for multiplier in (1e1, 1e5, 1e9):
        run = fit(papers.fedrobust(multiplier=multiplier, step=0.5 / multiplier))
        gaps.append(max((t - plain.state.shared[n]).abs().max().item() for n, t in run.state.shared.items()))
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-6


def test_delta_alone_is_universal_adversarial_training():
    """Λ = I: one perturbation for all images of a client, moved up while the weights move down."""
    data = federation(sizes=(8, 8))
    run = fit(papers.fedrobust(structure="identity", step=0.5, multiplier=0.0), data=data, training=WHOLE, rounds=3)
    plan = papers.fedavg().bind(net, SHAPE)
    plan.model.double()
    start = {n: t.double() for n, t in fit(papers.fedavg(), rounds=1, data=data).server.start().shared.items()}
    held = {n: t[0] for n, t in start.items()}
    deltas = [torch.zeros(SHAPE, dtype=torch.float64) for _ in data.clients]
    for _ in range(3):
        replies = []
        for number, client in enumerate(data.clients):
            x, y = (torch.from_numpy(values[client.train]) for values in (data.x_train / 255, data.y_train))
            network = Net(plan.model, {n: held[n] for n in plan.trained}, {n: held[n] for n in plan.buffers})

            def loss(w, delta, network=network, x=x, y=y):
                network.trained = w
                return torch.nn.functional.cross_entropy(network(x + delta, statistics="batch"), y)

            down, up = grad(loss, (0, 1))(network.trained, deltas[number])
            trained = {n: held[n] - 0.1 * g for n, g in down.items()}
            with torch.no_grad():
                network.trained = {n: held[n] for n in plan.trained}
                network.buffers = {n: held[n] for n in plan.buffers}
                network(x + deltas[number], statistics="batch")
            replies.append({**trained, **network.buffers})
            deltas[number] = deltas[number] + 0.5 * up
        held = {n: torch.stack([r[n] for r in replies]).mean(0) for n in held}
    assert_close({n: t[0] for n, t in run.state.shared.items()}, held, 1e-9)
    assert_close({"d": run.engine.store["shift.offset"][:, 0]}, {"d": torch.stack(deltas)}, 1e-9)


def test_shifts_are_warm_started():
    """For one client with one batch, two rounds of one step are one round of two steps."""
    data = federation(sizes=(12,))
    method = papers.fedrobust()
    twice = fit(method, data=data, rounds=2, training=WHOLE)
    once = fit(method, data=data, rounds=1, training=dataclasses.replace(WHOLE, epochs=2))
    assert_close(everything(twice), everything(once), 1e-9)
    assert twice.engine.store["shift.matrix"].abs().sum() > 0


def test_both_readings_of_tau():
    """training.steps is the communication period; ascend_every counts descent steps a step of ascent."""

    def offset(method, steps):
        training = dataclasses.replace(WHOLE, steps=steps)
        return fit(method, data=federation(sizes=(9, 9)), rounds=1, training=training).engine.store["shift.offset"]

    offsets = [offset(papers.fedrobust(ascend_every=3), steps) for steps in range(1, 7)]
    same = [torch.allclose(a, b, rtol=1e-9) for a, b in pairwise(offsets)]
    assert same == [True, True, False, True, True]
    assert not torch.allclose(offset(papers.fedrobust(), 3), offsets[2])


@pytest.mark.parametrize("engine", ENGINES)
def test_shifts_never_leave_the_client(engine, monkeypatch):
    """Nothing an engine yields, and nothing the server holds, is Λ or δ or has their values."""
    seen, train = [], ENGINES[engine].train

    def spy(self, work):
        for updates in train(self, work):
            seen.append({**work.shared, **work.reported, **updates.shared, **updates.reported})
            yield updates

    monkeypatch.setattr(ENGINES[engine], "train", spy)
    run = fit(papers.fedrobust(), engine=EngineChoice(name=engine, device="cpu", precision="float64"), rounds=2)
    assert {n for n in run.engine.store if n.startswith("shift.")} == {"shift.matrix", "shift.offset"}
    assert seen and not any("shift" in name for travelled in seen for name in travelled)
    assert not any("shift" in name for name in {**run.state.shared, **run.state.reported, **run.state.memory})
    plain = fit(papers.fedavg(), rounds=2)
    assert run.figures.bytes_up == plain.figures.bytes_up and run.figures.bytes_down == plain.figures.bytes_down


# composition


def test_momentum_lives_between_rounds_of_one_step():
    """Kept by SGD, or dampened in dsgd around the same objective at ten times the rate: the same steps, from TOML. Born
    anew each round it is refused."""
    data = federation(sizes=(10, 10, 10, 10))
    fedrobust = "method = { name = 'fedrobust', norm = 'absent', step = 0.1 }"
    shift = "{ name = 'shifted', step = 0.1 }"
    dampened = f"method = {{ name = 'dsgd', momentum = 0.9, norm = 'absent', objective = {shift} }}"

    def run(method, rate, optimiser=""):
        text = f"rounds = 4\n{method}\n{optimiser}\n"
        text += f"[training]\nsteps = 1\nbatch = 4\nrate = {rate}\n"
        text += "[engine]\nname = 'sequential'\ndevice = 'cpu'\nprecision = 'float64'\n"
        return hardy.fit(config.parse(text), model=net, data=data, quiet=True)

    kept = "optimiser = { name = 'sgd', momentum = 0.9, kept = true }"
    one, other, plain = run(fedrobust, 0.01, kept), run(dampened, 0.1), run(fedrobust, 0.01)
    assert_close(one.state.shared, other.state.shared, 1e-9)
    mine, theirs = ({n: t for n, t in r.engine.store.items() if n.startswith("shift.")} for r in (one, other))
    assert mine["shift.matrix"].abs().sum() > 0
    assert_close(mine, theirs, 1e-9)
    assert max((plain.state.shared[n] - t).abs().max() for n, t in one.state.shared.items()) > 1e-4
    with pytest.raises(HardyError, match="momentum is born anew each round, so it has no effect"):
        run(fedrobust, 0.01, kept.replace(", kept = true", ""))


def test_it_combines_with_other_parts():
    """Local BatchNorm, FedProx's term and SCAFFOLD from Python; FBN's norm and SFAT's slack from TOML."""
    robust = papers.fedrobust(norm=local())
    run = fit(robust, rounds=2)
    assert {"shift.matrix", "norm1.weight"} <= set(run.engine.store)
    pulled = robust.replace(objective=proximal(inner=robust.objective, strength=0.1))
    assert not torch.equal(fit(pulled, rounds=2).state.shared["fc.weight"], run.state.shared["fc.weight"])
    text = """
        rounds = 2
        [method]
        name = "fedrobust"
        structure = "channel"
        norm = "federated"
        objective = "adversarial"
        aggregator = { name = "pipeline", pre = ["slack"] }
    """
    read = config.method(config.parse(text))
    assert read.objective.structure == "channel" and read.objective.inner.mix == 0.5
    assert fit(read, rounds=2).engine.store["shift.matrix"].abs().sum() > 0
    controlled = papers.scaffold(objective=shifted(structure="diagonal"))
    assert {"shift.matrix", "c_i.fc.weight"} <= set(fit(controlled, rounds=2).engine.store)


# the theory


def test_the_diagnosis_of_a_quadratic_game_is_exact():
    """f = a/2 w² + b wψ − c/2 ψ²: Φ(w) = (a + b²/c)/2 w², and every constant is known."""
    a, b, c = 3.0, 2.0, 5.0
    w, psi = {"w": torch.tensor([0.7], dtype=torch.float64)}, {"p": torch.tensor([0.1], dtype=torch.float64)}

    def f(w, psi):
        return (a / 2 * w["w"] ** 2 + b * w["w"] * psi["p"] - c / 2 * psi["p"] ** 2).sum()

    found = probe(f, lambda psi, slope: {"p": psi["p"] + 0.1 * slope["p"]}, w, psi, ascents=60)
    exact = {"L1": a, "L2": c, "L12": b, "L21": b, "eta2": 0.1, "gap": (b * 0.7 - c * 0.1) ** 2 / (2 * c)}
    for name, value in exact.items():
        assert found[name].item() == pytest.approx(value, rel=1e-6), name
    assert found["gradient"]["w"].item() == pytest.approx((a + b**2 / c) * 0.7, rel=1e-6)
    assert found["slope"].item() / (2 * found["gap"].item()) == pytest.approx(c, rel=1e-6)  # the PL constant


def test_theorem_2_names_the_conditions_that_step_sizes_break():
    smooth = {"L1": 1.0, "L2": 4.0, "L12": 0.5, "L21": 0.5, "pl": 4.0}
    assert broken(**smooth, eta1=0.01, eta2=0.1, steps=1) == []
    first = broken(**smooth, eta1=0.01, eta2=0.5, steps=1)
    assert len(first) == 1 and first[0].startswith("η₂ ≤ 1/L₂: broken 2 times over; lower the ascent step")
    second = broken(**smooth | {"L12": 50.0, "L21": 0.0}, eta1=0.01, eta2=0.1, steps=1)
    assert [text.partition(":")[0] for text in second] == ["η₁/η₂ ≤ µ₂²n²/8L₁₂²"]
    both = broken(**smooth, eta1=0.05, eta2=0.1, steps=6)
    assert [text.partition(":")[0] for text in both] == ["32η₁²(τ−1)²L₁² ≤ 1", "η₁(L̂ + 40L̃(τ−1)²) ≤ 1"]


def test_the_diagnosis_of_a_run(tmp_path):
    evaluation = EvaluationChoice(every=2, diagnosis=(primal_gap(),))
    found = []
    for name in ENGINES:
        engine = EngineChoice(name=name, device="cpu", precision="float64")
        fit(papers.fedrobust(step=0.4), out=tmp_path / name, engine=engine, evaluation=evaluation)
        found.append([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    first, second = found
    keys = ("primal_gap", "phi_gradient", "wasserstein_bound")
    assert [all(key in line for key in keys) for line in first] == [False, True, False, True]
    for one, other in zip(first[1::2], second[1::2], strict=True):
        assert all(one[key] == pytest.approx(other[key], rel=1e-6) and one[key] > 0 for key in keys)
    assert first[-1]["smoothness"]["L2"] > 1 / 0.4 and any("η₂ ≤ 1/L₂" in t for t in first[-1]["broken_conditions"])
    report = (tmp_path / "sequential" / "report.html").read_text()
    assert "Primal gap" in report and "η₂ ≤ 1/L₂: broken" in report
    with pytest.raises(HardyError, match="diagnosis primal_gap measures the objective shifted"):
        fit(papers.fedavg(), evaluation=evaluation)


def test_theorem_4_bounds_the_cost_of_a_shift():
    """The coupling (x, x·Λ + δ) costs at least the Wasserstein distance; the bound must lie above it."""
    objective = shifted()
    _, state, batch, _ = one_client(objective)
    moved = objective.shift(state.private, batch.x)
    cost = (moved - batch.x).flatten(1).square().sum(1).mean() / 2
    matrix, offset = objective.lengths(state.private)
    moment = torch.linalg.eigvalsh(batch.x.flatten(1).T @ batch.x.flatten(1) / 5).max()
    bound = wasserstein_bound(matrix, offset, batch.x)
    torch.testing.assert_close(bound, moment.clamp_min(1) * (matrix + offset), rtol=1e-6, atol=0)
    assert 0 < cost <= bound


def test_the_spectral_norm_and_its_gradient():
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.linalg.matrix_norm
    torch.testing.assert_close(spectral_norm(matrix, iterations=200), exact(matrix, 2))
    slope = grad(lambda m: spectral_norm(m, iterations=200))(matrix)
    torch.testing.assert_close(slope, grad(lambda m: exact(m, 2))(matrix))
    assert spectral_norm(torch.zeros(3, 2), iterations=2) == 0


def test_lipschitz_shrinks_the_weights():
    plain, held = (
        fit(papers.fedavg(objective=objective)).state.shared["fc.weight"][0]
        for objective in (cross_entropy(), lipschitz(strength=0.5))
    )
    assert torch.linalg.matrix_norm(held, 2) < 0.8 * torch.linalg.matrix_norm(plain, 2)
    none = fit(papers.fedrobust(objective=lipschitz(strength=0.0)))
    assert_close(everything(none), everything(fit(papers.fedrobust())), 0)


def test_mistakes():
    for options, message in (
        ({"step": 0.6, "multiplier": 2.0}, r"η₂λ\) of Λ is 1.2; above 1 .* step of 0.25 or less"),
        ({"offset_step": 5.0, "offset_multiplier": 0.5}, "of δ is 2.5"),
        ({"step": -1.0}, "step and multiplier of Λ are -1.0 and 2.0"),
        ({"structure": "blocks"}, "Did you mean 'block'"),
        ({"centre": 1.5}, "centre is 1.5; it is a grey from 0"),
        ({"ascend_every": 0}, "ascend_every 0"),
    ):
        with pytest.raises(HardyError, match=message):
            papers.fedrobust(**options)
    for options, shape, message in (
        ({}, (3, 256, 256), "a full Λ for images of 196608 values has .* Take structure channel"),
        ({"structure": "block", "size": 3}, SHAPE, "patches of 3x3 do not tile images of 8x8"),
        ({"structure": "low_rank", "size": 9}, SHAPE, "size is 9; images of 8x8 have at most 8"),
    ):
        with pytest.raises(HardyError, match=message):
            shifted(**options).private(shape, 4)
    for structure in ("block", "channel", "low_rank", "diagonal", "identity"):  # large images are possible
        held = shifted(structure=structure).private((3, 256, 256), 4)
        assert sum(t.numel() for t in held.values()) < 1e7


def test_sweeps_make_the_figures_of_the_paper(tmp_path):
    """Figure 1's two sweeps, Figure 2's and unseen devices: a curve each, in a run's report and in a comparison."""
    text = (
        "affine@0.1,1,steps=2,affine@0.3,1,steps=2,affine@0.3,2,steps=2,pgd-2@l2,eps=1,pgd-2@l2,eps=2,camera@1,camera@2"
    )
    for name in ("one", "two"):
        run = fit(papers.fedavg(), rounds=1, out=tmp_path / name)
        found = evaluate(run, text, checks=False, quiet=True)
    curves = read_run(run.folder).sweeps()
    clean, by_threat = found["standard_accuracy"]["mean"], found["robust_accuracy"]
    assert {key: [at for at, _ in points] for key, points in curves.items()} == {
        ("‖Λ − I‖", "affine, ‖δ‖ 1"): [0.1, 0.3],
        ("‖δ‖", "affine, ‖Λ − I‖ 0.3"): [1, 2],
        ("L2 radius", "pgd-2"): [0, 1, 2],
        ("strength of the shift", "camera"): [0, 1, 2],
    }
    assert curves["L2 radius", "pgd-2"][0][1] == clean
    assert curves["‖δ‖", "affine, ‖Λ − I‖ 0.3"][1][1] == by_threat["affine@0.3,2,steps=2"]["mean"]
    page = write_comparison([tmp_path / "one", tmp_path / "two"], tmp_path / "page.html").read_text()
    assert (
        "Accuracy against the ‖δ‖" in (run.folder / "report.html").read_text()
        and "pgd-2: against the L2 radius" in page
    )
