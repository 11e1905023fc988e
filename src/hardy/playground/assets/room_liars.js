// Liars' table: updates as points in a plane; every rule moves at once.

function liarsRoom() {
  const random = randomSource(7);
  const bell = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
  let clients = 9, liars = 2, lie = "fall of empires", factor = 2;
  let own = [];
  const draw = () => { while (own.length < clients) own.push([1 + 0.5 * bell(), 0.8 + 0.5 * bell()]); own.length = clients; };
  draw();
  const sent = () => {
    const honest = own.slice(0, clients - liars);
    return [...honest, ...LIES[lie](honest, own.slice(clients - liars), factor)];
  };
  const plane = el("div"), table = el("div", { class: "scroll" }), majority = el("p", { class: "odds", "aria-live": "polite" });
  const show = () => {
    const points = sent(), truth = mean(points.slice(0, clients - liars));
    const results = RULES.map((rule) => ({ ...rule, at: clients > liars + 2 ? rule.apply(points, liars) : null, fits: clients >= rule.least(liars), limit: limitOf(rule, clients) }));
    drawPlane(plane, points, clients - liars, results, truth, (at, point) => { own[at] = point; if (at >= clients - liars) { lie = "by hand"; which.set(lie); } show(); });
    table.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...["rule", "withstands", "off by"].map((w, at) => el("th", { class: at < 1 ? "left" : "" }, w)))),
      el("tbody", {}, ...results.map((r, at) => el("tr", {},
        el("td", { class: "left" }, el("span", { class: `key c${at}` }), r.name, el("br"), el("small", {}, r.words)),
        el("td", { class: r.fits || !liars ? "" : "over" }, `${r.limit} of ${clients}${r.fits || !liars ? "" : ": too few"}`),
        el("td", {}, r.at ? Math.sqrt(squaredDistance(r.at, truth)).toFixed(3) : "–"))))));
    const population = cohort.population.get(), lying = Math.min(cohort.liars.get(), population), size = Math.min(cohort.size.get(), population);
    const half = Math.ceil(size / 2) - 1;
    fill(majority, el("b", {}, percent(chanceOfMore(population, lying, size, half), 2)), ` of the cohorts of ${size} out of ${population} clients, ${lying} of whom lie, hold at least as many liars as honest clients. Then no rule that sees this round alone can hold: DeMoA remembers what clients sent before.`);
  };
  const which = choice("Hostile clients send", Object.keys(LIES).map((name) => [name, name]), lie, (v) => {
    if (v === "by hand") { const points = sent(); for (let at = clients - liars; at < clients; at++) own[at] = points[at]; }
    lie = v; show();
  });
  const cohort = {
    population: slider("Clients in all", { min: 5, max: 500, step: 5, value: 50, onchange: () => show() }),
    liars: slider("Liars among them", { min: 0, max: 250, step: 1, value: 10, onchange: () => show() }),
    size: slider("Cohort", { min: 3, max: 100, step: 1, value: 5, onchange: () => show() }),
  };
  const room = el("div", {},
    el("div", { class: "controls" },
      slider("Clients in the round, n", { min: 5, max: 25, step: 1, value: clients, onchange: (v) => { clients = v; liars = Math.min(liars, v - 3); draw(); show(); } }),
      slider("Liars, f", { min: 0, max: 10, step: 1, value: liars, onchange: (v) => { liars = Math.min(v, clients - 3); show(); } }),
      which, slider("Strength of the lie", { min: 0, max: 10, step: 0.25, value: factor, onchange: (v) => { factor = v; show(); } })),
    el("div", { class: "sides" }, el("section", { class: "side" }, plane, el("p", { class: "note" }, "Drag a point, or focus it and use the arrow keys. Circles are honest, squares lie, crosses are what the rules make of them, the ring is the mean of the honest. “Withstands” is the largest number of liars f for which a rule is proven to hold; “off by” the distance of its result from the mean of the honest.")), el("section", { class: "side" }, table)),
    el("h3", {}, "Will a sampled cohort have an honest majority?"),
    el("div", { class: "controls" }, ...Object.values(cohort)), majority);
  show();
  return room;
}

function drawPlane(box, points, honest, results, truth, move) {
  const unit = 80, x = (v) => 220 + unit * v, y = (v) => 170 - unit * v; // alike on both axes: distances are seen
  const inside = (v, most) => clamp(v, -most, most);
  const focused = document.activeElement?.dataset?.point;
  const svg = el("svg", { class: "chart plane", viewBox: "0 0 440 340", role: "group", "aria-label": "updates of the clients in a plane" });
  const back = (event) => {
    const frame = box.firstElementChild.getBoundingClientRect(); // a drag draws the plane anew
    return [(((event.clientX - frame.left) / frame.width) * 440 - 220) / unit, (170 - ((event.clientY - frame.top) / frame.height) * 340) / unit];
  };
  svg.append(el("line", { class: "rule", x1: 10, x2: 430, y1: 170, y2: 170 }), el("line", { class: "rule", x1: 220, x2: 220, y1: 10, y2: 330 }),
    el("circle", { class: "aim", cx: x(truth[0]), cy: y(truth[1]), r: 13 }, el("title", {}, "the mean of the honest")));
  const seen = new Map(); // how many points lie at a place
  points.forEach((point, at) => {
    const px = inside(x(point[0]) - 220, 208) + 220, py = inside(y(point[1]) - 170, 158) + 170, liar = at >= honest;
    const spot = `${Math.round(px)} ${Math.round(py)}`;
    seen.set(spot, { px, py, count: (seen.get(spot)?.count ?? 0) + 1 });
    const shape = liar ? el("rect", { x: px - 6, y: py - 6, width: 12, height: 12 }) : el("circle", { cx: px, cy: py, r: 6 });
    svg.append(el("g", { class: `point ${liar ? "liar" : "honest"}`, tabindex: 0, role: "button", "data-point": at,
      "aria-label": `${liar ? "liar" : "honest client"} ${at + 1} at ${point.map((v) => v.toFixed(2)).join(", ")}`,
      onpointerdown: (event) => {
        event.preventDefault();
        const drag = (e) => move(at, back(e));
        const end = () => { window.removeEventListener("pointermove", drag); window.removeEventListener("pointerup", end); };
        window.addEventListener("pointermove", drag);
        window.addEventListener("pointerup", end);
      },
      onkeydown: (event) => {
        const by = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
        if (by) { event.preventDefault(); move(at, [point[0] + by[0], point[1] + by[1]]); }
      } }, shape));
  });
  for (const { px, py, count } of seen.values()) if (count > 1) svg.append(el("text", { class: "tick", x: px + 10, y: py + 4 }, `× ${count}`));
  results.forEach((result, at) => {
    if (!result.at) return;
    const px = inside(x(result.at[0]) - 220, 208) + 220, py = inside(y(result.at[1]) - 170, 158) + 170;
    svg.append(el("g", { class: `cross c${at}` }, el("path", { d: `M${px - 7} ${py - 7}L${px + 7} ${py + 7}M${px - 7} ${py + 7}L${px + 7} ${py - 7}` }), el("title", {}, result.name)));
  });
  box.replaceChildren(svg);
  if (focused !== undefined) svg.querySelector(`[data-point="${focused}"]`)?.focus();
}
