// One file, many networks: width and robustness as sliders, and where that lies among what was measured.

function widthRoom(page) {
  const choices = page.networks.filter((n) => n.settings.length > 1);
  if (!choices.length) return el("p", { class: "note" }, "The networks here have one width and one robustness. “hardy run split_mix --out runs/many”, then “hardy playground runs/many”, shows one with several.");
  const chosen = el("div"), show = (network) => chosen.replaceChildren(sliders(page, network));
  const last = choices.length - 1; // runs are named from the plain to the robust
  show(choices[last]);
  return el("div", {}, choices.length > 1 ? el("div", { class: "controls" }, choice("Run", choices.map((n, at) => [at, n.name]), last, (at) => show(choices[at]))) : null, chosen);
}

function sliders(page, network) {
  const { shape, classes, images } = page;
  let width = 1, robustness = network.robustness, at = page.first;
  const chart = el("div"), facts = el("dl", { class: "headline" }), shown = picture("the image"), bars = el("div", { class: "bars" });
  const answer = el("p", { class: "verdict", "aria-live": "polite" });
  const choose = (row) => {
    [width, robustness] = [row.width, row.robustness];
    size.set(network.widths.indexOf(width));
    if (network.mixes) level.set(robustness);
    draw();
  };

  const draw = latest(async (current) => {
    const setting = { width, robustness }, row = network.measured(setting);
    drawFrontier(chart, network, row, choose);
    const logits = await network.logits(images[at].pixels, setting);
    const began = performance.now(), repeats = 10;
    for (let n = 0; n < repeats; n++) await network.logits(images[at].pixels, setting);
    const milliseconds = (performance.now() - began) / repeats;
    if (!current()) return;
    paintImage(shown, images[at].pixels, shape);
    showProbabilities(bars, softmax(logits), classes, images[at].label);
    const read = argmax(logits);
    answer.textContent = `Reads “${classes[read]}”, ${read === images[at].label ? "right" : "wrong"}`;
    const exact = Math.abs(row.width - width) < 1e-9 && (!network.mixes || Math.abs(row.robustness - robustness) < 1e-9);
    const near = exact ? "" : ` (measured at ×${row.width}${network.mixes ? `, λ = ${row.robustness}` : ""})`;
    fill(facts, [
      ["bases at work", `${network.basesAt(width)} of ${network.bases.length}`],
      [`accuracy${near}`, plusMinus(row.standard)],
      ...Object.entries(row.robust).map(([threat, value]) => [`under ${threat}${near}`, plusMinus(value)]),
      ["MACs an image", (row.macs / 1e6).toFixed(2) + " M"],
      ["time an image, here", `${milliseconds.toFixed(2)} ms`],
    ].map(([words, value]) => el("div", {}, el("dt", {}, words), el("dd", {}, value))));
    chart.dataset.ready = "yes";
  });

  const level = slider("Robustness λ", { min: 0, max: 1, step: 0.05, value: robustness ?? 0, show: (v) => v.toFixed(2), onchange: (v) => { robustness = v; draw(); } });
  level.hidden = !network.mixes;
  const size = slider("Width", { min: 0, max: network.widths.length - 1, step: 1, value: network.widths.length - 1,
    show: (v) => `×${network.widths[v]}`, onchange: (v) => { width = network.widths[v]; draw(); } });
  draw();
  return el("div", {},
    el("div", { class: "controls" }, size, level,
      slider("Image", { min: 0, max: images.length - 1, step: 1, value: at, show: (v) => `${v + 1} of ${images.length}`, onchange: (v) => { at = v; draw(); } })),
    facts, el("div", { class: "sides" }, el("section", { class: "side" }, chart), el("section", { class: "side" }, shown, answer, bars)));
}

// Every measured setting: accuracy across, robust accuracy up (MACs where none is known), the area of a point its MACs.
// A line joins the settings of one width; a click on a point chooses it, as the sliders do.
function drawFrontier(box, network, here, choose) {
  const threat = network.settings.flatMap((r) => Object.keys(r.robust)).find((name) => network.settings.every((r) => r.robust[name]?.mean != null));
  const rows = network.settings.filter((r) => r.standard.mean !== null), most = Math.max(...rows.map((r) => r.macs));
  const up = (r) => (threat ? r.robust[threat].mean : r.macs), form = (v) => (threat ? percent(v, 0) : `${Number((v / 1e6).toPrecision(3))} M`);
  const ticksOf = (values) => roundTicks(Math.min(...values), Math.max(...values));
  const across = ticksOf(rows.map((r) => r.standard.mean)), down = ticksOf(rows.map(up));
  const x = (v) => 48 + ((v - across[0]) / (across.at(-1) - across[0])) * 300, y = (v) => 250 - ((v - down[0]) / (down.at(-1) - down[0])) * 222;
  const radius = (r) => 3 + 6 * Math.sqrt(r.macs / most);
  const lines = (network.mixes ? network.widths.map((w) => rows.filter((r) => r.width === w)) : [rows]).filter((line) => line.length);
  const ends = lines.map((line) => line.reduce((end, r) => (r.standard.mean > end.standard.mean ? r : end)));
  const tops = spread(ends.map((r) => y(up(r)) + 4), 14);
  const words = (r) => `×${r.width}${network.mixes ? `, λ = ${r.robustness}` : ""}: ${plusMinus(r.standard)} clean${threat ? `, ${plusMinus(r.robust[threat])} under ${threat}` : ""}`;
  fill(box, el("svg", { class: "chart", viewBox: "0 0 390 290", role: "img", "aria-label": `accuracy against ${threat ? "accuracy under " + threat : "MACs"} of all settings; now ${words(here)}` },
    ...down.flatMap((v) => [el("line", { class: "rule", x1: 48, x2: 348, y1: y(v), y2: y(v) }), el("text", { class: "tick end", x: 42, y: y(v) + 4 }, form(v))]),
    ...across.map((v) => el("text", { class: "tick middle", x: x(v), y: 268 }, percent(v, 0))),
    el("text", { class: "tick middle", x: 198, y: 286 }, "accuracy on clean images"),
    el("text", { class: "tick", x: 48, y: 12 }, threat ? `accuracy under ${threat}` : "MACs of an image"),
    ...lines.map((line) => el("polyline", { class: "curve c0 faint", points: line.map((r) => `${x(r.standard.mean)},${y(up(r))}`).join(" ") })),
    ...lines.map((line, at) => (network.mixes ? el("text", { x: x(ends[at].standard.mean) + 14, y: tops[at] }, `×${ends[at].width}`) : null)).filter(Boolean),
    ...rows.map((r) => el("circle", { class: "dot pickable c0", cx: x(r.standard.mean), cy: y(up(r)), r: radius(r), onclick: () => choose(r) }, el("title", {}, words(r)))),
    el("circle", { class: "dot here", cx: x(here.standard.mean), cy: y(up(here)), r: radius(here) + 3 })),
  el("p", { class: "note" }, (network.mixes ? "A line is a width, a point on it a robustness λ. " : "A point is a width. ") + "Its area is its multiply-accumulates (MACs). Click one to choose it."));
}
