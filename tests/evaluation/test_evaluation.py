"""Evaluation: every client as deployed, engines alike, resumable, honest about branches."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import hardy
from conftest import federation, fit, net
from hardy import papers
from hardy.attacks.autoattack import fab
from hardy.attacks.threats import parse_threat as parse
from hardy.config import EvaluationChoice
from hardy.core.engine import Branches
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.evaluation import measure as evaluating
from hardy.evaluation.measure import ServedClients
from hardy.models import tiny_cnn
from hardy.papers.fedbn import local
from hardy.parts.adversarial import adversarial
from hardy.parts.norms import batch, dual
from hardy.runs.api import evaluate

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def five_classes(norm):
        return tiny_cnn(norm=norm, shape=(1, 8, 8), classes=5, width=0.25)

    folder = tmp_path_factory.mktemp("runs") / "run"
    return fit(papers.fedbn(), data=federation(classes=5), model=five_classes, out=folder, rounds=6)


def test_engines_agree_on_personal_and_shared_networks():
    for method in (papers.fedbn(), papers.fedavg()):
        found = []
        for options in ({}, {"engine": VECTORISED}):
            one = fit(method, **options)
            found.append(evaluate(one, "pgd-3@0.1,square-5,affine@0.5,1", checks=False, quiet=True))
        assert found[0]["standard_accuracy"] == found[1]["standard_accuracy"]
        assert found[0]["robust_accuracy"] == found[1]["robust_accuracy"]


def test_a_common_shift_is_found_on_all_images_at_once(run):
    one = fit(papers.fedavg(), rounds=4)
    deployed = ServedClients(one.engine, one.state, "test", Branches(), None)
    shift = parse("affine@0.5,1,common=true,steps=10").attack
    found = np.concatenate(deployed.right(deployed.attacked(shift, deployed.answers(), torch.tensor(0))))
    every = np.concatenate(deployed.rows)
    data, held = one.engine.data, {n: t[0] for n, t in one.state.shared.items()}

    def forward(x):
        return torch.func.functional_call(one.engine.plan.model, held, (x,))

    x, y = torch.from_numpy(data.x_test[every]).double() / 255, torch.from_numpy(data.y_test[every])
    by_hand = forward(shift.perturb(forward, x, y, torch.tensor(0))).argmax(1) == y
    assert (found == by_hand.numpy()).all() and not found.all()
    with pytest.raises(HardyError, match="common=true"):
        evaluate(run, "affine@0.5,1,common=true", checks=False, quiet=True)
    with pytest.raises(HardyError, match="'fedbn' each has its own"):
        fit(papers.fedbn(), evaluation=EvaluationChoice(threats=("affine@0.5,1,common=true",)))


def test_the_worst_shift_of_every_image_is_measured(run):
    """As the run's threat, asked of the run, and of its network alone, which has no clients: the share of images that
    withstand each attack and are right as they are."""
    options = {"evaluation": EvaluationChoice(threats=("affine-worst-5@0.5,1,common=true",)), "rounds": 4}
    one = fit(papers.fedavg(), **options)
    served = ServedClients(one.engine, one.state, "test", Branches(), None)
    text = "affine-worst-5@0.5,1,common=true"
    right = [np.concatenate(served.standing())]
    for name, attack in parse(text).attack.stages():
        key = torch.tensor(0)
        right.append(np.concatenate(served.right(served.attacked(attack, served.answers(), key))))
        assert name in ("error", "cross_entropy", "as_published")
    by_hand = np.all(right, axis=0)
    found = evaluate(one, text, checks=False, quiet=True)["robust_accuracy"][text]
    assert sum(found["by_client"][c] * len(rows) for c, rows in enumerate(served.rows)) == pytest.approx(by_hand.sum())
    assert one.summary()["robust_accuracy"][text]["mean"] == found["mean"]
    assert list(found["stages"]) == ["error", "cross_entropy", "as_published"]
    assert by_hand.sum() < min(mask.sum() for mask in right[1:])
    rows = one.engine.data
    every = np.concatenate(served.rows)
    alone = hardy.evaluate(one.module(), (rows.x_test[every][:, 0], rows.y_test[every]), text, checks=False)
    assert alone["robust_accuracy"][text]["mean"] == pytest.approx(by_hand.mean(), abs=0.02)  # in float32


@pytest.mark.parametrize("norm", [local(), batch(), batch(inference_statistics="batch")])
def test_a_call_holds_no_more_points_than_it_may(norm, monkeypatch):
    """Of all clients in it, and all classes that an attack aims at; but a client normalised by its batch is not cut."""
    one = fit(papers.fedavg(norm=norm), rounds=1, engine=VECTORISED)
    deployed = ServedClients(one.engine, one.state, "test", Branches(), None)
    held, mapped = [], one.engine.map

    def counted(function, common, own, x, *rest):
        held.append(x.shape[:2])
        return mapped(function, common, own, x, *rest)

    monkeypatch.setattr(one.engine, "map", counted)
    monkeypatch.setattr(evaluating, "POINTS", 14)
    everybody = [torch.nn.functional.one_hot(labels, 3).double() for labels in deployed.labels]
    deployed.attacked(fab(targets=2, steps=1), everybody, torch.tensor(0))
    assert sum(map(math.prod, held)) >= sum(len(rows) for rows in deployed.rows)
    assert all(clients * rows <= 7 or (clients == 1 and deployed.together) for clients, rows in held)


def test_each_client_is_served_by_its_own_tensors(run):
    """The figure of a client is that of its own network on its own rows, computed by hand."""
    deployed = ServedClients(run.engine, run.state, "test", Branches(), None)
    threat = parse("pgd-5@0.1,start=none")
    left = deployed.right(deployed.attacked(threat.attack, deployed.answers(), torch.tensor(0)))
    data, plan = run.engine.data, run.engine.plan
    for number, client in enumerate(data.clients):
        own = {n: t[number, 0] for n, t in run.engine.store.items()}
        held = {**{n: t[0] for n, t in run.state.shared.items()}, **own}

        def forward(x, held=held):
            return torch.func.functional_call(plan.model, held, (x,))

        x = torch.from_numpy(data.x_test[client.test]).double() / 255
        y = torch.from_numpy(data.y_test[client.test])
        attacked = threat.attack.perturb(forward, x, y, torch.tensor(0))
        by_hand = (forward(x).argmax(1) == y) & (forward(attacked).argmax(1) == y)
        assert np.array_equal(left[number], by_hand.numpy()), number


def test_attacks_hurt_and_larger_ones_more(run):
    found = evaluate(run, "pgd-10", epsilons=[2, 8, 64], checks=False, quiet=True)["robust_accuracy"]
    means = [found[name]["mean"] for name in ("pgd-10@2/255", "pgd-10@8/255", "pgd-10@64/255")]
    assert means == sorted(means, reverse=True) and means[-1] < means[0]
    assert found["pgd-10"]["mean"] == found["pgd-10@8/255"]["mean"] or abs(means[1] - found["pgd-10"]["mean"]) < 0.1


def test_files_pictures_and_summary(run):
    evaluate(run, "fgsm@32/255", checks=False, quiet=True)
    written = json.loads((run.folder / "evaluation.json").read_text())
    assert written["provenance"]["settings"] == {"part": "test", "limit": None, "attack": "clean", "predict": "clean"}
    assert written["robust_accuracy"]["fgsm@32/255"]["attack"]["epsilon"] == pytest.approx(32 / 255)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["robust_accuracy"]["fgsm@32/255"]["mean"] == written["robust_accuracy"]["fgsm@32/255"]["mean"]
    assert (run.folder / "pictures" / "attack fgsm_32_255.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_evaluation_goes_on_between_stages(run, monkeypatch):
    text = "autoattack@eps=16/255,steps=3,targets=2,queries=5"
    whole = evaluate(run, text, checks=False, quiet=True)["robust_accuracy"][text]
    assert list(whole["stages"]) == ["apgd_ce", "apgd_t", "fab_t", "square"]
    (run.folder / "evaluation.json").unlink()
    honest, calls = ServedClients.attacked, []

    def stop_at_the_third(self, attack, *given, **how):
        calls.append(type(attack).__name__)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(self, attack, *given, **how)

    monkeypatch.setattr(ServedClients, "attacked", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, text, checks=False, quiet=True)
    assert evaluate(run, text, checks=False, quiet=True)["robust_accuracy"][text] == whole
    assert calls == ["APGD", "APGD", "FAB", "FAB", "Square"]
    calls.clear()
    assert evaluate(run, text, checks=False, quiet=True)["robust_accuracy"][text] == whole and not calls


def test_branches_are_named_and_matter():
    """A dual norm is attacked and judged with the statistics that were asked for."""
    one = fit(papers.fedavg(norm=dual(), objective=adversarial(branch="adversarial")), rounds=2)
    for name, tensor in one.state.shared.items():
        if name.endswith("adversarial.mean"):
            tensor += torch.linspace(-50, 50, tensor.numel()).view_as(tensor)  # statistics that fit no image
    found = {
        branch: evaluate(one, "pgd-2@0.2", attack_branch=branch, predict_branch=branch, checks=False, quiet=True)
        for branch in ("clean", "adversarial")
    }
    assert found["clean"]["provenance"]["settings"]["predict"] == "clean"
    assert found["clean"]["standard_accuracy"]["mean"] == 1 > found["adversarial"]["standard_accuracy"]["mean"]
    with pytest.raises(HardyError, match="unknown branch 'adversarial'"):
        evaluate(fit(papers.fedavg(), rounds=1), "fgsm", attack_branch="adversarial", quiet=True)


def test_threats_of_an_experiment_reach_the_summary(tmp_path):
    one = fit(papers.fedavg(), rounds=1, evaluation=EvaluationChoice(threats=("fgsm",)), out=tmp_path / "run")
    assert one.summary()["robust_accuracy"]["fgsm"]["mean"] <= one.summary()["standard_accuracy"]["mean"]
    assert "fgsm" in json.loads((tmp_path / "run" / "summary.json").read_text())["robust_accuracy"]


def test_the_best_round_may_be_the_most_robust_one(tmp_path):
    choice = EvaluationChoice(select="pgd-3@0.3")
    one = fit(papers.fedavg(), rounds=6, evaluation=choice, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    attacked = [line["selection_accuracy"]["mean"] for line in lines]
    clean = [line["validation_accuracy"]["mean"] for line in lines]
    most = max(range(6), key=attacked.__getitem__)
    assert most != max(range(6), key=clean.__getitem__)  # else this test could not fail
    best = one.summary()["best"]
    assert (best["round"], best["validation_accuracy"], best["select"]) == (most + 1, attacked[most], choice.select)

    assert f"{choice.select}, validation" in (tmp_path / "run" / "report.html").read_text()

    before = (tmp_path / "run" / "summary.json").read_text()
    chosen = hardy.load(tmp_path / "run", best=True, method=papers.fedavg(), model=net, data=federation())
    found = hardy.evaluate(chosen, choice.select, part="validation", checks=False, quiet=True)
    assert found["robust_accuracy"][choice.select]["mean"] == attacked[most]
    assert chosen.summary()["seconds"] == pytest.approx(sum(line["seconds"] for line in lines[: most + 1]))
    assert chosen.summary()["robust_accuracy"] == {}
    hardy.evaluate(chosen, choice.select, checks=False, quiet=True)
    assert (tmp_path / "run" / "summary.json").read_text() == before  # figures of the last round stay what they are
    assert (tmp_path / "run" / "best" / "evaluation.json").exists()
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_a_run_that_goes_on_by_another_measure_forgets_the_best_by_the_old_one(tmp_path):
    given = {"method": papers.fedavg(), "model": net, "data": federation()}
    fit(papers.fedavg(), rounds=3, out=tmp_path / "run")
    saved = tmp_path / "run" / "config.toml"
    longer = saved.read_text().replace("rounds = 3", "rounds = 4")
    saved.write_text(longer.replace("[evaluation]", '[evaluation]\nselect = "pgd-3@0.3"'))
    with pytest.raises(HardyError, match=r"evaluation.select was 'absent', is 'pgd-3@0.3'.*--allow-change"):
        hardy.resume(tmp_path / "run", **given, quiet=True)
    best = hardy.resume(tmp_path / "run", **given, quiet=True, allow_change=True).figures.best
    assert (best["round"], best["select"]) == (4, "pgd-3@0.3")


def test_validation_rows_are_needed_by_one_client_at_least(tmp_path):
    data, choice = federation(), EvaluationChoice(select="fgsm")
    without = [dataclasses.replace(client, validation=client.validation[:0]) for client in data.clients]
    some = dataclasses.replace(data, clients=(*without[:2], *data.clients[2:]))
    found = fit(papers.fedavg(), data=some, rounds=1, evaluation=choice).figures.best
    assert found["validation_accuracy"] is not None
    nobody = dataclasses.replace(data, clients=tuple(without))
    with pytest.raises(HardyError, match="no client has validation rows"):
        fit(papers.fedavg(), data=nobody, evaluation=choice, out=tmp_path / "run")
    fit(papers.fedavg(), data=nobody, rounds=1, out=tmp_path / "run")
    with pytest.raises(HardyError, match="has no best round"):
        hardy.load(tmp_path / "run", method=papers.fedavg(), model=net, data=nobody, best=True)


def test_mistakes(run):
    for threats, options, message in (
        ("pdg-20", {}, "Did you mean 'pgd-20'"),
        ("pgd-20", {"limit": 0}, "limit is 0"),
        ("pgd-20@4/255", {"epsilons": [1]}, "name it without options"),
    ):
        with pytest.raises(HardyError, match=message):
            evaluate(run, threats, checks=False, quiet=True, **options)
    with pytest.raises(HardyError, match="unknown threat"):
        EvaluationChoice(threats=("pdg",))
    with pytest.raises(HardyError, match="unknown threat"):
        EvaluationChoice(select="pdg")
    assert hardy.evaluate(run, "", quiet=True)["robust_accuracy"] == {}


def test_one_attack_under_two_names_runs_once(monkeypatch):
    """pgd-7 is pgd-7@8/255, here and in the rounds' own figures."""
    names, calls = ("pgd-2", "pgd-2@8/255", "pgd-2@eps=8/255"), []
    attacked = ServedClients.attacked
    monkeypatch.setattr(ServedClients, "attacked", lambda *args, **how: calls.append(args[1]) or attacked(*args, **how))
    trained = fit(papers.fedavg(), rounds=1, evaluation=EvaluationChoice(threats=names))
    assert len(calls) == 1 and len({str(trained.robust[name]["by_client"]) for name in names}) == 1
    found = evaluate(trained, names, checks=False, quiet=True)["robust_accuracy"]
    assert len(calls) == 2 and found.keys() == set(names)
    assert found["pgd-2"] == found["pgd-2@8/255"] == found["pgd-2@eps=8/255"]
