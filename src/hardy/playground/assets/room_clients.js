// Who is served well? A map of the clients, by domain.

function clientsRoom(page) {
  const runs = page.runs.filter((run) => run.clients.length);
  if (!runs.length) return el("p", { class: "note" }, "No run here has figures for its clients.");
  let run = runs.find((r) => r.alpha) ?? runs[0], threat = "", chosen = worstServed(run);
  const map = el("div"), detail = el("section", { class: "side", "aria-live": "polite" });
  const value = (client) => (threat ? client.robust[threat] : client.standard);
  const show = () => {
    drawClients(map, run, value, chosen, (at) => { chosen = at; show(); });
    describeClient(detail, page, run, run.clients[chosen]);
  };
  const colour = choice("Colour by", [["", "clean accuracy"]], "", (v) => { threat = v; show(); });
  const offer = () => {
    const names = Object.keys(run.clients[0].robust);
    const fresh = choice("Colour by", [["", "clean accuracy"], ...names.map((n) => [n, `accuracy under ${n}`])], threat, (v) => { threat = v; show(); });
    colour.replaceChildren(...fresh.children);
  };
  offer();
  show();
  return el("div", {},
    el("div", { class: "controls" }, choice("Run", runs.map((r, at) => [at, r.name]), runs.indexOf(run), (v) => { run = runs[v]; threat = ""; chosen = worstServed(run); offer(); show(); }), colour),
    el("div", { class: "sides" }, el("section", { class: "side" }, map), detail));
}

// The client to begin with: the least accurate one, under FedRBN of those that were given statistics.
function worstServed(run) {
  const asked = run.clients.filter((client, at) => !run.alpha || run.alpha[at].length);
  return (asked.length ? asked : run.clients).reduce((worst, client) => ((client.standard ?? 1) < (worst.standard ?? 1) ? client : worst)).number;
}

function drawClients(box, run, value, chosen, choose) {
  const domains = [...new Set(run.clients.map((c) => c.domain))];
  const rows = domains.map((d) => run.clients.map((c, at) => [c, at]).filter(([c]) => c.domain === d));
  const longest = Math.max(...rows.map((r) => r.length)), gap = Math.min(80, 340 / longest), tall = 66;
  const place = new Map();
  rows.forEach((row, y) => row.forEach(([, at], x) => place.set(at, [90 + gap * (x + 0.5), 26 + tall * y])));
  const known = run.clients.map(value).filter((v) => v !== null && v !== undefined);
  const low = Math.min(...known), high = Math.max(...known);
  const shade = (v) => (v === null || v === undefined ? "var(--track)" : `color-mix(in oklab, var(--c1), var(--c0) ${Math.round(high > low ? (100 * (v - low)) / (high - low) : 100)}%)`);
  const arrows = (run.alpha?.[chosen] ?? []).map((share, giver) => {
    if (giver === chosen || share < 0.02) return null;
    const [x1, y1] = place.get(giver), [x2, y2] = place.get(chosen), long = Math.hypot(x2 - x1, y2 - y1) || 1;
    const [dx, dy] = [(x2 - x1) / long, (y2 - y1) / long], tip = Math.min(22, gap / 2 - 2) + 2, wide = 3 + 4 * share;
    const at = (back, aside) => `${x2 - back * dx - aside * dy} ${y2 - back * dy + aside * dx}`;
    return el("g", { class: "arrow" },
      el("line", { x1, y1, x2: x2 - (tip + 5) * dx, y2: y2 - (tip + 5) * dy, "stroke-width": 1 + 5 * share }),
      el("path", { d: `M${at(tip, 0)}L${at(tip + 9, wide)}L${at(tip + 9, -wide)}Z` }),
      el("title", {}, `client ${giver} gives ${percent(share, 0)}`));
  }).filter(Boolean);
  const mixed = new Set(run.clients.map((c) => c.kind)).size > 1;
  const dots = run.clients.map((client, at) => {
    const [x, y] = place.get(at);
    const words = `client ${at}, ${client.domain}${client.kind ? `, ${client.kind}` : ""}: ${percent(value(client))}`;
    const pick = () => choose(at);
    return el("g", { class: `client${at === chosen ? " chosen" : ""}`, tabindex: 0, role: "button", "aria-label": words, "aria-pressed": at === chosen, onclick: pick,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); } } },
      el("circle", { cx: x, cy: y, r: Math.min(22, gap / 2 - 2), style: `fill:${shade(value(client))}` }),
      el("text", { class: "middle", x, y: y + 4 }, value(client) === null || value(client) === undefined ? "–" : Math.round(100 * value(client))), mixed && client.kind ? el("text", { class: "middle kind", x, y: y + 36 }, client.kind) : null, el("title", {}, words));
  });
  const height = tall * domains.length;
  fill(box,
    el("svg", { class: "chart map", viewBox: `0 0 440 ${height}`, role: "group", "aria-label": "clients by domain" },
      ...domains.map((d, y) => el("text", { class: "tick", x: 0, y: 30 + tall * y }, d)), ...arrows, ...dots),
    known.length ? el("p", { class: "scale" }, percent(low, 0), el("span", {}), percent(high, 0)) : null,
    el("p", { class: "note" }, (known.length ? "Accuracy on the client's test images." : "No accuracy was measured for each client.") + (mixed ? " AT clients train adversarially, ST clients cannot afford it." : "") + (run.alpha ? " Arrows: whose adversarial statistics the chosen client got (FedRBN's α)." : "")));
  const focus = box.querySelector(".chosen");
  if (document.activeElement === document.body && box.dataset.used) focus?.focus();
  box.dataset.used = "yes";
}

function describeClient(box, page, run, client) {
  const most = Math.max(1, ...client.labels);
  const counts = el("div", { class: "bars", role: "group", "aria-label": "training images of each class" }, ...client.labels.map((count, at) =>
    el("div", { class: "bar" }, el("span", {}, page.classes[at]), el("span", { class: "track" }, el("span", { class: "fill", style: `width:${(100 * count) / most}%` })), el("span", { class: "value" }, count))));
  const giving = (run.alpha?.[client.number] ?? []).map((share, at) => [share, at]).filter(([share, at]) => share >= 0.02 && at !== client.number).sort((a, b) => b[0] - a[0]);
  const pictures = client.pictures.map((p) => {
    const pair = [picture("an image of the client"), picture("the same image attacked")];
    paintImage(pair[0], p.clean, page.shape);
    paintImage(pair[1], p.attacked, page.shape);
    return el("figure", {}, el("div", { class: "pair" }, ...pair), el("figcaption", {}, `A “${page.classes[p.label]}”: read as “${page.classes[p.read]}”, attacked as “${page.classes[p.fooled]}”`));
  });
  fill(box,
    el("h3", {}, `Client ${client.number}, ${client.domain}`),
    el("p", { class: "note" }, `${client.kind === "AT" ? "Trains adversarially. " : client.kind === "ST" ? "Cannot afford adversarial training. " : ""}${client.train} training images. ${percent(client.standard)} clean` +
      Object.entries(client.robust).map(([name, v]) => `, ${percent(v)} under ${name}`).join("") + "."),
    giving.length ? el("p", { class: "note" }, `Its adversarial statistics come from ${giving.slice(0, 4).map(([s, at]) => `client ${at} (${percent(s, 0)})`).join(", ")}.`) : null,
    el("h3", {}, "Its training images by class"), counts,
    pictures.length ? el("h3", {}, "Its test images, as they are and attacked by PGD-10") : null, el("div", { class: "cases" }, ...pictures));
}
