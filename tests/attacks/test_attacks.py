"""Attacks: budgets, purity, strength; threats by name."""

import contextlib
import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, stack_module_state
from torch.nn import functional as F

from hardy.attacks import autoattack  # noqa: F401  (fills the registry)
from hardy.attacks.affine import affine, affine_shift, affine_worst
from hardy.attacks.balls import length, random_start
from hardy.attacks.base import margin
from hardy.attacks.gradient import cw, fgsm, mim, pgd
from hardy.attacks.square import local_search, square
from hardy.attacks.threats import PRESETS, parse_threat, parse_threats
from hardy.core import random
from hardy.core.layers import calling
from hardy.errors import HardyError
from hardy.models import tiny_cnn
from hardy.registry import PARTS

KEY = torch.tensor(7)
SMALL = {"steps": 2, "queries": 6, "candidates": 5, "pixels": 2, "neighbourhood": 1}


def small(name: str, **changes):
    """An attack of the registry with few steps."""
    factory = PARTS["attack"][name]
    known = {field.name for field in dataclasses.fields(factory)}
    return factory(**{key: value for key, value in (SMALL | changes).items() if key in known})


BALLED = [
    pytest.param(name, ball, id=f"{name}-{ball}")
    for name, factory in sorted(PARTS["attack"].items())
    for ball in ("linf", "l2")
    if not name.startswith("affine") and (ball == "linf" or any(f.name == "ball" for f in dataclasses.fields(factory)))
]
VARIANTS = {
    **{f"{name.values[0]}-{name.values[1]}": small(name.values[0], ball=name.values[1]) for name in BALLED},
    "best-of-two": pgd(steps=2, restarts=2, keep_best=True),
    "kl": pgd(steps=2, loss="kl", start="normal"),
    "margin": pgd(steps=2, loss="margin", start="none"),
    "affine": affine(steps=2),
    "affine-cross-entropy": affine(steps=2, loss="cross_entropy"),
    "affine-worst": affine_worst(steps=2),
    "affine-channel": affine(steps=2, form="channel", clip=True),
    "affine-diagonal": affine(steps=2, form="diagonal"),
}


def net() -> torch.nn.Module:
    return tiny_cnn(shape=(1, 8, 8), classes=4, width=0.25).double()


def images(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four classes of patterns under noise, [N, 1, 8, 8]."""
    pattern = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=draw)
    noise = torch.randn(count, 1, 8, 8, generator=draw, dtype=torch.float64)
    return (0.3 + 0.4 * pattern[y] + 0.15 * noise).clamp(0, 1), y


def trained_net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = net()
    x, y = images(200, seed)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        with calling(branch="clean", statistics="batch", key=None):
            loss = F.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return model


@pytest.fixture(scope="module")
def model():
    return trained_net(1)


def accuracy(model, x, y) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


@pytest.mark.parametrize(("name", "ball"), BALLED)
@settings(max_examples=8, deadline=None)
@given(
    epsilon=st.sampled_from([0.0, 1e-4, 8 / 255, 0.3, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**40),
)
def test_stays_in_ball_and_box(name, ball, epsilon, dtype, seed):
    key = torch.tensor(seed)
    x = (1.4 * random.uniform(random.fold(key, 1), (3, 2, 5, 6), dtype) - 0.2).clamp(0, 1)  # some on the walls
    weight = random.normal(random.fold(key, 2), (60, 4), dtype)
    y = torch.tensor([0, 1, 3])
    found = small(name, epsilon=epsilon, ball=ball).perturb(lambda z: z.flatten(1) @ weight, x, y, key)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert found.min() >= 0 and found.max() <= 1
    assert (length(found - x, ball) <= epsilon * (1 + 1e-5) + 1e-7).all()
    if epsilon == 0:
        assert torch.equal(found, x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_vmap_over_nets_equals_a_loop(variant):
    attack = VARIANTS[variant]
    models = [net() for _ in range(2)]
    for number, each in enumerate(models):
        for name, buffer in each.named_buffers():
            if name.endswith(("mean", "var")) and "scale" not in name:
                buffer += 0.1 * (number + 1)
    x, y = (torch.stack(pair) for pair in zip(images(4, 1), images(4, 2), strict=True))
    keys = torch.tensor([3, 4])

    def run(params, buffers, x, y, key):
        return attack.perturb(lambda z: functional_call(models[0], {**params, **buffers}, (z,)), x, y, key)

    together = torch.vmap(run)(*stack_module_state(models), x, y, keys)
    for number, each in enumerate(models):
        alone = attack.perturb(each, x[number], y[number], keys[number])
        torch.testing.assert_close(together[number], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_leaves_no_trace(model, variant):
    """Neither buffers nor modes nor gradients change; the key alone decides; nothing flows back through it."""
    attack = VARIANTS[variant]
    x, y = images(6, 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x_before, mode = x.clone(), model.training
    found = attack.perturb(model, x, y, KEY)
    assert torch.equal(found, attack.perturb(model, x, y, KEY.clone()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, x_before) and model.training == mode
    assert not found.requires_grad and all(p.grad is None for p in model.parameters())

    params = dict(model.named_parameters())
    buffers = dict(model.named_buffers())

    def loss(params, frozen=None):
        def forward(z):
            return functional_call(model, {**params, **buffers}, (z,))

        return F.cross_entropy(forward(attack.perturb(forward, x, y, KEY) if frozen is None else frozen), y)

    through, around = grad(loss)(params), grad(lambda p: loss(p, found))(params)
    for name, value in through.items():
        torch.testing.assert_close(value, around[name])


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("affine")])
def test_an_image_does_not_depend_on_its_batch(model, variant):
    x, y = images(8, 6)
    attack = VARIANTS[variant]
    torch.testing.assert_close(attack.perturb(model, x, y, KEY)[:3], attack.perturb(model, x[:3], y[:3], KEY))


@pytest.mark.parametrize("ball", ["linf", "l2"])
def test_one_step_against_a_linear_net_is_the_closed_form(ball):
    key = torch.tensor(1)
    x = 0.3 + 0.4 * random.uniform(random.fold(key, 1), (5, 1, 4, 4), torch.float64)
    weight = random.normal(random.fold(key, 2), (16, 2), torch.float64)
    y = torch.tensor([0, 1, 0, 1, 1])
    uphill = (weight[:, 1 - y] - weight[:, y]).T.reshape(x.shape)
    unit = uphill.sign() if ball == "linf" else uphill / uphill.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    for attack in (
        fgsm(epsilon=0.1, ball=ball),
        pgd(epsilon=0.1, step=0.05, steps=2, ball=ball, start="none"),
        cw(epsilon=0.1, step=0.05, steps=400, ball=ball),
    ):
        found = attack.perturb(lambda z: z.flatten(1) @ weight, x, y, key)
        torch.testing.assert_close(found, x + 0.1 * unit, rtol=0, atol=1e-6)


def test_starts(model):
    x, y = images(300, 3)
    x = 0.4 + 0.2 * x
    assert torch.equal(pgd(steps=0, start="none").perturb(model, x, y, KEY), x)
    noise = pgd(steps=0, start="normal").perturb(model, x, y, KEY) - x
    assert abs(noise.std().item() / 0.001 - 1) < 0.02
    flat = (pgd(steps=0).perturb(model, x, y, KEY) - x) * 255 / 8
    assert abs(flat.mean().item()) < 0.02 and abs(flat.std().item() * 3**0.5 - 1) < 0.02
    volume = (length(random_start(KEY, x, 0.1, "l2") - x, "l2") / 0.1) ** 64
    assert abs(volume.mean().item() - 0.5) < 0.05
    assert not torch.equal(pgd().perturb(model, x, y, KEY), pgd().perturb(model, x, y, KEY + 1))


def test_more_steps_and_more_epsilon_are_no_weaker(model):
    x, y = images(300, 2)
    clean = accuracy(model, x, y)
    assert clean > 0.9
    for name, values in {"steps": [0, 1, 3, 10, 30], "epsilon": [0.0, 0.02, 0.05, 0.1, 0.2]}.items():
        usual = {"epsilon": 0.1, "step": 0.025, "steps": 20}
        left = [accuracy(model, pgd(**usual | {name: v}).perturb(model, x, y, KEY), y) for v in values]
        assert all(after <= before + 0.01 for before, after in pairwise(left)), left
        assert left[0] > clean - 0.1 and left[-1] < clean - 0.3, left


def test_restarts_and_keeping_the_best_are_never_worse(model):
    x, y = images(200, 4)
    usual = {"epsilon": 0.06, "step": 0.03, "steps": 3, "loss": "margin"}
    gains = [
        margin(model(pgd(**usual, **more).perturb(model, x, y, KEY)), y).detach()
        for more in ({}, {"keep_best": True}, {"restarts": 4}, {"restarts": 4, "keep_best": True})
    ]
    for better in gains[1:]:
        assert ((better > 0) >= (gains[0] > 0)).all()
        assert (better >= gains[0])[better <= 0].all()
        assert better.sum() != gains[0].sum()


def test_momentum_confidence_and_divergence(model):
    x, y = images(50, 8)
    usual = {"epsilon": 0.1, "step": 0.02, "steps": 5}
    plain = pgd(**usual, start="none").perturb(model, x, y, KEY)
    assert torch.equal(mim(**usual, decay=0.0).perturb(model, x, y, KEY), plain)
    assert not torch.equal(mim(**usual).perturb(model, x, y, KEY), plain)
    on_margin = pgd(**usual, loss="margin").perturb(model, x, y, KEY)
    assert torch.equal(cw(**usual, confidence=1e6).perturb(model, x, y, KEY), on_margin)
    shy = margin(model(cw(**usual, confidence=0.01).perturb(model, x, y, KEY)), y)
    assert shy.mean() < margin(model(on_margin), y).mean()

    def divergence(z):
        return F.kl_div(model(z).log_softmax(1), model(x).softmax(1), reduction="batchmean").item()

    assert divergence(pgd(**usual, loss="kl", start="normal").perturb(model, x, y, KEY)) > 0.1
    with pytest.raises(HardyError, match="start='normal'"):
        pgd(loss="kl", start="none")


@pytest.mark.parametrize(("ball", "epsilon"), [("linf", 0.1), ("l2", 0.8)])
def test_square_needs_no_gradient(model, ball, epsilon):
    x, y = images(100, 9)
    clean = accuracy(model, x, y)
    left = [
        accuracy(model, square(epsilon=epsilon, ball=ball, queries=q).perturb(model, x, y, KEY), y) for q in (1, 60)
    ]
    assert left[1] < left[0] - 0.1 and left[1] < clean - 0.2, (clean, left)
    white = accuracy(model, pgd(epsilon=epsilon, step=epsilon / 4, steps=20, ball=ball).perturb(model, x, y, KEY), y)
    assert left[1] >= white - 0.02


def test_local_search_changes_few_pixels(model):
    x, y = images(60, 10)
    attack = local_search(steps=3, pixels=1, candidates=20, neighbourhood=2)
    found = attack.perturb(model, x, y, KEY)
    changed = (found != x).flatten(1).sum(1)
    right = model(x).argmax(1) == y
    assert changed.max() == 3 and (changed[~right] == 0).all()
    assert accuracy(model, found, y) < accuracy(model, x, y) - 0.2
    bounded = dataclasses.replace(attack, epsilon=0.05).perturb(model, x, y, KEY)
    assert accuracy(model, bounded, y) > accuracy(model, found, y)
    everything = local_search(steps=2, candidates=1000, pixels=64).perturb(model, x, y, KEY)  # more than there are
    assert ((everything != x).flatten(1).all(1) == right).all()
    patient = local_search(steps=64, candidates=1, pixels=1, neighbourhood=0)
    assert (patient.perturb(lambda _: F.one_hot(y, 4).double(), x, y, KEY) != x).all()  # no pixel twice


@pytest.mark.parametrize("form", ["full", "channel", "diagonal"])
@pytest.mark.parametrize("centre", [0.0, 0.5])
def test_affine_is_one_shift_within_both_radii(form, centre):
    key = torch.tensor(2)
    x = random.uniform(random.fold(key, 1), (20, 3, 4, 4), torch.float64)
    weight = random.normal(random.fold(key, 2), (48, 3), torch.float64)
    y = (x.flatten(1) @ weight).argmax(1)

    def forward(z):
        return z.flatten(1) @ weight

    attack = affine(rotation_radius=0.7, shift_radius=0.3, form=form, centre=centre)
    matrix, offset = attack.find(forward, x, y, KEY)
    full = affine_shift(torch.eye(48, dtype=x.dtype).view(48, 3, 4, 4), matrix, torch.zeros(()).double()).flatten(1)
    assert (full - torch.eye(48)).norm() == pytest.approx(0.7)
    assert offset.norm() == pytest.approx(0.3)
    found = attack.perturb(forward, x, y, KEY)
    torch.testing.assert_close(found, centre + ((x - centre).flatten(1) @ full).view_as(x) + offset)
    assert F.cross_entropy(forward(found), y) > F.cross_entropy(forward(x), y) + 0.05
    alone = [dataclasses.replace(attack, **{name: 0.0}) for name in ("rotation_radius", "shift_radius")]
    for weaker in alone:
        assert F.cross_entropy(forward(weaker.perturb(forward, x, y, KEY)), y) < F.cross_entropy(forward(found), y)
    nothing = dataclasses.replace(alone[0], shift_radius=0.0)
    torch.testing.assert_close(nothing.perturb(forward, x, y, KEY), x, rtol=0, atol=1e-15)
    clipped = dataclasses.replace(attack, clip=True).perturb(forward, x, y, KEY)
    assert found.min() < 0 and clipped.min() >= 0 and clipped.max() <= 1


def test_an_affine_shift_is_not_spent_on_images_that_are_lost():
    """Three images just right and one badly wrong pull the shift in opposite directions."""
    x, y = torch.tensor([0.9, 0.15, 0.15, 0.15]).view(4, 1, 1, 1), torch.tensor([0, 1, 1, 1])

    def forward(z):
        return torch.stack([torch.zeros(len(z)), 10 * z.flatten()], 1)

    for as_published, right in ((True, 3), (False, 0)):
        attack = affine(rotation_radius=0.0, shift_radius=0.3, as_published=as_published)
        assert (forward(attack.perturb(forward, x, y, KEY)).argmax(1) == y).sum() == right


def _linear(size, classes=4):
    weight = random.normal(KEY, (size, classes), torch.float64)
    return lambda z: 3 * z.flatten(1) @ weight


@pytest.mark.parametrize(("centre", "length"), [(0.0, 1), (0.5, 2)])
def test_the_published_steps_are_the_authors_in_their_range_of_pixels(centre, length):
    """Their ascent written anew, on images in [0, 1] or [-1, 1]: 0.05 times the gradient for both Λ and δ."""
    x, y = images(30)
    x = x[:, :, :3, :3]
    forward, theirs = _linear(9), (x - centre) * length
    matrix, offset = torch.eye(9, dtype=x.dtype), torch.zeros(1, 9, dtype=x.dtype)
    for _ in range(5):
        matrix, offset = matrix.requires_grad_(), offset.requires_grad_()
        seen = (theirs.flatten(1) @ matrix + offset) / length + centre
        turn, push = torch.autograd.grad(F.cross_entropy(forward(seen), y), (matrix, offset))
        away, offset = matrix.detach() + 0.05 * turn - torch.eye(9), offset.detach() + 0.05 * push
        matrix = torch.eye(9, dtype=x.dtype) + away * min(1.0, 0.06 / away.norm())
        offset = offset * min(1.0, 0.05 * length / offset.norm())
    attack = affine(rotation_radius=0.06, shift_radius=0.05, steps=5, as_published=True, centre=centre)
    found = attack.find(forward, x, y, KEY)
    assert (matrix - torch.eye(9)).norm() > 0.03 and offset.norm() > 0.01  # they have moved
    torch.testing.assert_close(found[0], matrix.detach())
    torch.testing.assert_close(found[1].flatten(), offset.detach().flatten() / length)


def test_normalised_ascent_of_the_cross_entropy():
    """Its steps are a tenth of the radius, and it finds a greater loss than the other ascent."""
    x, y = images(40)
    forward = _linear(64)
    found = {
        loss: F.cross_entropy(
            forward(affine(rotation_radius=0.3, shift_radius=0.3, loss=loss).perturb(forward, x, y, KEY)), y
        )
        for loss in ("error", "cross_entropy")
    }
    assert found["cross_entropy"] > found["error"] > F.cross_entropy(forward(x), y)
    one = affine(rotation_radius=0.3, shift_radius=0.5, steps=1, loss="cross_entropy")
    matrix, offset = one.find(forward, x, y, KEY)
    assert (matrix - torch.eye(64)).norm() == pytest.approx(0.03) and offset.norm() == pytest.approx(0.05)


def test_the_worst_affine_shift_is_taken_image_by_image():
    x, y = images(200)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    x, model = (x + 0.3 * noise).clamp(0, 1), trained_net(0)
    radii = {"rotation_radius": 0.1, "shift_radius": 0.3, "steps": 10}
    single = [affine(**radii, **more) for more in ({}, {"loss": "cross_entropy"}, {"as_published": True})]
    with torch.no_grad():
        right = torch.stack(
            [model(x).argmax(1) == y, *(model(a.perturb(model, x, y, KEY)).argmax(1) == y for a in single)]
        )
        worst = model(affine_worst(**radii).perturb(model, x, y, KEY)).argmax(1) == y
    assert torch.equal(worst, right.all(0))
    assert worst.sum() < right.sum(1).min()  # no single shift does it
    assert parse_threat("affine-worst-10@0.1,0.3").attack == affine_worst(**radii)


@pytest.mark.parametrize("make", [lambda: affine(as_published=True, centre=0.3), lambda: affine_worst(centre=0.3)])
def test_published_steps_have_two_centres(make):
    with pytest.raises(HardyError, match=r"authors' pixels are in \[0, 1\] \(centre 0\) or \[-1, 1\] \(centre 0.5\)"):
        make()


def test_published_steps_climb_one_loss():
    with pytest.raises(HardyError, match="loss=cross_entropy has no effect"):
        parse_threat("affine@0.4,1,as_published=true,loss=cross_entropy")


def test_a_full_affine_of_a_big_image_is_refused():
    with pytest.raises(HardyError, match="form='channel'"):
        affine().perturb(lambda z: z.flatten(1)[:, :2], torch.zeros(1, 3, 100, 100), torch.zeros(1).long(), KEY)


@pytest.mark.parametrize(
    ("factory", "wrong", "message"),
    [
        (pgd, {"epsilon": -0.1}, "epsilon of an attack is -0.1; it must be 0 or more"),
        (fgsm, {"epsilon": float("nan")}, "is nan"),
        (square, {"epsilon": float("inf")}, "finite"),
        (mim, {"steps": -1}, "steps of an attack is -1"),
        (cw, {"step": 0.0}, "step of an attack is 0.0; it must be above 0"),
        (pgd, {"restarts": 0}, "it must be 1 or more"),
        (square, {"queries": 0}, "it must be 1 or more"),
        (affine, {"shift_radius": -1.0}, "shift_radius"),
        (pgd, {"ball": "l1"}, "unknown ball of an attack 'l1'"),
        (pgd, {"start": "unifrom"}, "Did you mean 'uniform'?"),
    ],
)
def test_wrong_values_are_refused(factory, wrong, message):
    with pytest.raises(HardyError) as caught:
        factory(**wrong)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", PRESETS)
def test_presets_parse_and_their_names_parse_back(text):
    threat = parse_threat(text)
    assert threat.name == text
    assert parse_threat(threat.name) == threat
    assert parse_threat(f" {text.upper()} ".replace(",", ", ")) == threat


def test_threats_in_words():
    assert (
        parse_threat("pgd-20").attack
        == pgd(steps=20)
        == parse_threat("pgd-20@8/255").attack
        == parse_threat("pgd-20@linf").attack
    )
    assert parse_threat("pgd-7").attack == pgd()
    assert parse_threat("pgd-33@16/255").attack == pgd(steps=33, epsilon=16 / 255, step=4 / 255)
    assert parse_threat("pgd-20@eps=4/255,step=1e-3,restarts=5").attack == pgd(
        steps=20, epsilon=4 / 255, step=1e-3, restarts=5
    )
    assert parse_threat("pgd-20@l2,eps=0.5").attack == pgd(steps=20, ball="l2", epsilon=0.5, step=0.125)
    assert parse_threat("pgd-2@0.1").attack == pgd(steps=2, epsilon=0.1, step=0.05)
    assert parse_threat("pgd-5@0").attack == pgd(steps=5, epsilon=0.0)
    assert parse_threat("cw-30").attack == cw()
    assert parse_threat("mim-20@16/255").attack == mim(epsilon=16 / 255, step=4 / 255)
    assert parse_threat("lsa").attack == local_search(epsilon=1.0, steps=7)
    assert parse_threat("square-100@4/255").attack == square(queries=100, epsilon=4 / 255)
    assert parse_threat("affine@0.2,form=diagonal,2").attack == affine(
        rotation_radius=0.2, shift_radius=2.0, form="diagonal"
    )
    names = [threat.name for threat in parse_threats("pgd-20@l2,eps=0.5, autoattack,affine@0.4,1.0,square@1,l2,fgsm")]
    assert names == ["pgd-20@l2,eps=0.5", "autoattack", "affine@0.4,1.0", "square@1,l2", "fgsm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pdg-20", "unknown threat 'pdg-20'. Did you mean 'pgd-20'?"),
        ("pgd-0", "unknown threat"),
        ("fgsm-3", "Did you mean 'fgsm'?"),
        ("", "unknown threat"),
        ("pgd-20@stpe=1", "Did you mean 'step'?"),
        ("pgd-20@steps=3", "steps is given twice"),
        ("pgd-20@1,2", "unknown option of pgd-20"),
        ("pgd-20@x", "a fraction such as 8/255"),
        ("pgd-20@1/0", "'1/0'"),
        ("pgd-20@-1/255", "0 or more"),
        ("pgd-20@l2", "pgd-20@l2,eps=0.5"),
        ("pgd-20@0.1,keep_best=maybe", "true or false"),
        ("pgd-20@restarts=1.5", "a whole number"),
        ("lsa@l2", "unknown option of lsa"),
    ],
)
def test_mistaken_threats(text, message):
    with pytest.raises(HardyError) as caught:
        parse_threat(text)
    assert message in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12) | st.from_regex(r"(pgd-7|square|affine|apgd-t)@[a-z0-9=,./-]{0,12}", fullmatch=True))
def test_no_text_makes_a_traceback(text):
    with contextlib.suppress(HardyError):
        parse_threats(text)
