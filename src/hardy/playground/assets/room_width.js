// One file, many networks: width and robustness as sliders, and where that lies among what was measured.

function widthRoom(page) {
  const choices = page.networks.filter((n) => n.settings.length > 1);
  if (!choices.length) return el("p", { class: "note" }, "None of these runs has more than one width or robustness. Train one with method split_mix_dat.");
  const { shape, classes, images } = page;
  let network = choices[choices.length - 1], width = 1, robustness = network.robustness ?? 0, at = 0;
  const chart = el("div"), facts = el("dl", { class: "headline" }), shown = picture("the image"), bars = el("div", { class: "bars" });
  const answer = el("p", { class: "verdict", "aria-live": "polite" });

  const draw = latest(async (current) => {
    const setting = { width, robustness }, row = network.measured(setting);
    drawFrontier(chart, network.settings, row);
    const logits = await network.logits(images[at].pixels, setting);
    const began = performance.now(), repeats = 10;
    for (let n = 0; n < repeats; n++) await network.logits(images[at].pixels, setting);
    const milliseconds = (performance.now() - began) / repeats;
    if (!current()) return;
    paintImage(shown, images[at].pixels, shape);
    showProbabilities(bars, softmax(logits), classes, images[at].label);
    const read = argmax(logits);
    answer.textContent = `Reads “${classes[read]}”${read === images[at].label ? ", right" : ", wrong"}`;
    const exact = Math.abs(row.width - width) < 1e-9 && (row.robustness === null || Math.abs(row.robustness - robustness) < 1e-9);
    const near = exact ? "" : ` (measured at ×${row.width}${row.robustness === null ? "" : `, λ ${row.robustness}`})`;
    facts.replaceChildren(...[
      ["bases at work", `${network.basesAt(width)} of ${network.bases.length}`],
      [`accuracy${near}`, plusMinus(row.standard)],
      ...Object.entries(row.robust).map(([threat, value]) => [`under ${threat}${near}`, plusMinus(value)]),
      ["MACs an image", (row.macs / 1e6).toFixed(2) + " M"],
      ["time an image, here", `${milliseconds.toFixed(2)} ms`],
    ].map(([words, value]) => el("div", {}, el("dt", {}, words), el("dd", {}, value))));
    chart.dataset.ready = "yes";
  });

  const level = slider("Robustness λ", { min: 0, max: 1, step: 0.05, value: robustness, show: (v) => v.toFixed(2), onchange: (v) => { robustness = v; draw(); } });
  level.hidden = !network.mixes;
  const size = slider("Width", { min: 0, max: network.widths.length - 1, step: 1, value: network.widths.length - 1,
    show: (v) => `×${network.widths[v]}`, onchange: (v) => { width = network.widths[v]; draw(); } });
  draw();
  return el("div", {},
    el("div", { class: "controls" }, size, level,
      slider("Image", { min: 0, max: images.length - 1, step: 1, value: 0, show: (v) => `${v + 1} of ${images.length}`, onchange: (v) => { at = v; draw(); } })),
    facts, el("div", { class: "sides" }, el("section", { class: "side" }, chart), el("section", { class: "side" }, shown, answer, bars)));
}

// Every measured setting: accuracy across, robust accuracy up, the area of a point its MACs.
function drawFrontier(box, rows, here) {
  const threat = Object.keys(rows[0].robust)[0];
  const across = rows.map((r) => r.standard.mean), up = rows.map((r) => (threat ? r.robust[threat].mean : r.macs));
  const range = (values) => { const low = Math.min(...values), high = Math.max(...values), pad = (high - low || 0.1) * 0.12; return [low - pad, high + pad]; };
  const [left, right] = range(across), [bottom, top] = range(up), most = Math.max(...rows.map((r) => r.macs));
  const x = (v) => 44 + ((v - left) / (right - left)) * 330, y = (v) => 250 - ((v - bottom) / (top - bottom)) * 236;
  const dots = rows.map((r, at) => el("circle", { class: r === here ? "dot here" : "dot c0", cx: x(across[at]), cy: y(up[at]), r: (r === here ? 3 : 0) + 3 + 6 * Math.sqrt(r.macs / most) },
    el("title", {}, `×${r.width}${r.robustness === null ? "" : `, λ ${r.robustness}`}: ${plusMinus(r.standard)} clean, ${threat ? plusMinus(r.robust[threat]) + " under " + threat : ""}`)));
  const mark = (value, form) => form(value);
  const form = (v) => (threat ? percent(v, 0) : (v / 1e6).toFixed(1));
  box.replaceChildren(el("svg", { class: "chart", viewBox: "0 0 390 290", role: "img", "aria-label": `accuracy against ${threat ? "accuracy under " + threat : "MACs"} of all settings` },
    el("line", { class: "rule", x1: 44, x2: 374, y1: 250, y2: 250 }), el("line", { class: "rule", x1: 44, x2: 44, y1: 14, y2: 250 }),
    ...[0.15, 0.85].flatMap((s) => { const v = left + s * (right - left), w = bottom + s * (top - bottom); return [
      el("text", { class: "tick middle", x: x(v), y: 266 }, mark(v, (p) => percent(p, 0))), el("text", { class: "tick end", x: 40, y: y(w) + 4 }, mark(w, form))]; }),
    el("text", { class: "tick middle", x: 209, y: 284 }, "accuracy on clean images"),
    el("text", { class: "tick", x: 48, y: 12 }, threat ? `accuracy under ${threat}` : "MACs, millions"), ...dots));
}
