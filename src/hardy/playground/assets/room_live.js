// Live: what a run that trains says of each round.

function liveRoom({ live }) {
  let rows = [];
  const facts = el("dl", { class: "headline" }), state = el("p", { class: "note", role: "status" }, "Waiting for the first round …");
  const accuracy = el("div"), loss = el("div");
  const last = (key) => rows.findLast((row) => row[key] !== null)?.[key] ?? null;
  const draw = () => {
    const round = rows.at(-1)?.round ?? 0, series = (key) => rows.filter((r) => r[key] !== null).map((r) => [r.round, r[key]]);
    fill(facts, ...[
      ["round", live.rounds ? `${round} of ${live.rounds}` : String(round)],
      ["mean accuracy", percent(last("mean"))],
      ["worst client", percent(last("worst"))],
      ["loss", last("loss")?.toFixed(3) ?? "–"],
      ["seconds a round", last("seconds")?.toFixed(1) ?? "–"],
      ["replies lost", String(rows.reduce((sum, r) => sum + r.lost, 0))],
    ].map(([words, value]) => el("div", {}, el("dt", {}, words), el("dd", {}, value))));
    const domains = [...new Set(rows.flatMap((r) => Object.keys(r.domains)))];
    drawSeries(accuracy, "accuracy on test images", [["mean", series("mean")], ["worst client", series("worst")],
      ...(domains.length > 1 ? domains.map((d) => [d, rows.filter((r) => typeof r.domains[d] === "number").map((r) => [r.round, r.domains[d]])]) : [])],
      (v) => percent(v, 0));
    drawSeries(loss, "training loss", [["loss", series("loss")]], (v) => String(Number(v.toPrecision(3))));
  };
  const events = new EventSource("events");
  let waiting = false;
  events.onmessage = ({ data }) => {
    const told = JSON.parse(data);
    if (told.restart) rows = [];
    else if (told.finished !== undefined) state.textContent = told.finished ? "The run is finished. Its report is report.html in its folder." : "The run trains.";
    else {
      rows = rows.filter((row) => row.round !== told.round).concat(told);
      if (state.textContent.startsWith("Waiting") || state.textContent.startsWith("No ")) state.textContent = "The run trains.";
    }
    if (!waiting) { waiting = true; setTimeout(() => { waiting = false; draw(); }, 50); }
  };
  events.onerror = () => { state.textContent = "No connection: hardy playground --live has ended. What is here stays."; };
  draw();
  return el("div", {}, state, facts, el("div", { class: "sides" },
    el("section", { class: "side" }, el("h3", {}, "Accuracy"), accuracy),
    el("section", { class: "side" }, el("h3", {}, "Loss"), loss)),
    el("p", { class: "note" }, live.own ? "The other rooms show this run's networks as they were when the server was started."
      : "The run had no checkpoint when the server was started: the other rooms show networks of Hardy's own."));
}

// Curves over rounds, each named at its end.
function drawSeries(box, words, all, form) {
  const series = all.filter(([, points]) => points.length);
  if (!series.length) { box.replaceChildren(); return; }
  const every = series.flatMap(([, points]) => points), values = every.map(([, v]) => v);
  const rungs = roundTicks(Math.min(0, ...values), Math.max(...values)), low = rungs[0], high = rungs.at(-1);
  const first = every.reduce((a, [r]) => Math.min(a, r), Infinity), end = every.reduce((a, [r]) => Math.max(a, r), 0);
  const x = (r) => 44 + (end > first ? ((r - first) / (end - first)) * 260 : 0), y = (v) => 200 - ((v - low) / (high - low || 1)) * 184;
  const tops = spread(series.map(([, points]) => y(points.at(-1)[1]) + 4), 14);
  box.replaceChildren(el("svg", { class: "chart", viewBox: "0 0 430 224", role: "img", "aria-label": `${words} over rounds: ${series.map(([name, points]) => `${name} ${form(points.at(-1)[1])}`).join(", ")}` },
    ...rungs.flatMap((v) => [el("line", { class: "rule", x1: 44, x2: 304, y1: y(v), y2: y(v) }), el("text", { class: "tick end", x: 38, y: y(v) + 4 }, form(v))]),
    el("text", { class: "tick", x: 44, y: 220 }, `round ${first}`), el("text", { class: "tick end", x: 304, y: 220 }, String(end)),
    ...series.map(([name, points], at) => el("g", { class: `c${at % 8}` },
      el("polyline", { class: "curve", points: points.map(([r, v]) => `${x(r)},${y(v)}`).join(" ") }),
      el("circle", { cx: x(points.at(-1)[0]), cy: y(points.at(-1)[1]), r: 2.5 }),
      el("text", { x: 311, y: tops[at] }, `${name} ${form(points.at(-1)[1])}`)))));
}
