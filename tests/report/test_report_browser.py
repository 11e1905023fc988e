"""The report in a real Chromium: values by keys, curves on and off, the filter; nothing asked, nothing said."""

import numpy as np
import pytest
from test_report import NASTY, make_run

from hardy.report.pictures import image_grid_png
from hardy.report.run_page import write_report


@pytest.fixture(scope="module")
def report(browser, tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("report") / "run")
    for client in (0, 3):
        sheet = image_grid_png([np.zeros((2, 3, 3, 1), np.uint8)], ["images, seen as a, b"])
        (folder / "pictures" / f"attack pgd, client {client}.png").write_bytes(sheet)
    browser.resize(1280)
    browser.open(write_report(folder).as_uri())
    yield browser
    assert browser.requests() == [] and browser.complaints() == []


def test_values_by_keys_and_by_pointer(report):
    report.script("document.querySelector('svg.chart').focus()")
    report.press("Home")
    tip = "return document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').innerText"
    assert report.script(tip).splitlines() == ["5", "mean 17.5%", "worst client 15.5%", "validation 70%"]
    report.press("ArrowRight")
    assert report.script(tip).startswith("10")
    report.script("document.activeElement.blur()")
    assert report.script(tip) == ""
    left, top, width = report.script(
        "const b = document.querySelector('svg.chart').getBoundingClientRect(); return [b.left, b.top, b.width]"
    )
    report.drag([(left + 2, top + 20), (left + width - 2, top + 20)])
    assert report.script(tip).startswith("20")


def test_a_curve_goes_and_comes_back(report):
    shown = """return [...document.querySelector('svg.chart').querySelectorAll('path[data-x]')].map(
        (p) => getComputedStyle(p).visibility)"""
    report.script("document.querySelector('svg.chart text.switch').focus()")
    report.press("Enter")
    assert report.script(shown) == ["hidden", "visible", "visible"]
    assert report.script("return document.activeElement.getAttribute('aria-pressed')") == "false"
    report.press("Space")
    assert report.script(shown) == ["visible"] * 3


def test_the_filter_shows_one_client_and_its_pictures(report):
    choose = """const list = document.querySelectorAll('.filter select')[{}];
        list.value = arguments[0];
        list.dispatchEvent(new Event('change'))"""
    report.script(choose.format(1), "3")
    said = report.script("return document.querySelector('.filter p').innerText")
    assert said == f"Client 3, {NASTY}: 9 training images, ST, 71% on clean images, 36% under pgd."
    pictures = "return [...document.querySelectorAll('figure[data-client]')].map((f) => f.hidden)"
    assert report.script(pictures) == [True, False]
    assert report.script("return document.querySelectorAll('.dot.chosen').length") > 0
    report.script(choose.format(0), "pen")
    assert report.script(pictures) == [False, True]
    assert report.script("return document.querySelectorAll('th.dim').length") == 1
    report.script(choose.format(0), "")
    assert report.script("return document.querySelectorAll('.dim').length") == 0


@pytest.mark.parametrize("width", [420, 800, 1600])
def test_nothing_is_wider_than_the_window(report, width):
    report.resize(width)
    assert report.script("return document.documentElement.scrollWidth") == width
    report.script("document.querySelectorAll('details').forEach((d) => d.setAttribute('open', ''))")
    cut = "return [...document.querySelectorAll('.sheet')].filter((s) => s.scrollWidth > s.clientWidth).length"
    assert report.script(cut) == 0


def test_in_print_it_is_on_white_and_whole(report):
    report.devtools("Emulation.setEmulatedMedia", media="print", features=[])
    shown = "return getComputedStyle(document.querySelector(arguments[0])).display"
    assert [report.script(shown, part) for part in (".filter", ".sections", "main")] == ["none", "none", "block"]
    assert report.script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert report.script("return getComputedStyle(document.querySelector('.chart .c1')).printColorAdjust") == "exact"
    report.devtools("Emulation.setEmulatedMedia", media="", features=[])
