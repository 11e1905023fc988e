// Draw and attack: one image, two networks side by side.

function attackRoom(page) {
  const { shape, classes, images, networks } = page;
  const robustest = networks.find((n) => n.mixes) ?? networks[networks.length - 1];
  let from = page.first, { pixels: image, label } = images[from];
  const settings = { attack: "pgd", epsilon: 8, steps: 10, target: "" };

  // a single network beside itself only where its robustness can be chosen: at 0 and at 1
  const alone = networks.length === 1, compared = alone && !robustest.mixes ? [robustest] : [networks[0], robustest];
  const sides = compared.map((network, number) => {
    const side = { network, setting: { width: 1, robustness: !network.mixes ? null : number ? 1 : alone ? 0 : network.robustness } };
    side.clean = el("span", { class: "clean" });
    side.attacked = el("span");
    side.pictures = [picture("the image under attack"), picture("what the attack added, times ten"), picture("the image as it is")];
    side.bars = el("div", { class: "bars", role: "group", "aria-label": "probability of each class" });
    side.curve = el("div");
    side.verdict = el("p", { class: "verdict", "aria-live": "polite" });
    side.radius = el("p", { class: "note", "aria-live": "polite" });
    side.known = el("p", { class: "note" });
    side.trace = [];
    side.which = choice(compared.length === 1 ? "Network" : number ? "Network on the right" : "Network on the left",
      networks.map((n, at) => [at, n.name]), networks.indexOf(network), (at) => {
        side.network = networks[at];
        side.setting.robustness = side.network.robustness;
        robustness.hidden = !side.network.mixes;
        if (side.network.mixes) robustness.set(side.setting.robustness);
        run();
      });
    const robustness = slider("Robustness λ", { min: 0, max: 1, step: 0.05, value: side.setting.robustness ?? 0,
      show: (v) => v.toFixed(2), onchange: (v) => { side.setting.robustness = v; run(); } });
    robustness.hidden = !network.mixes;
    side.box = el("section", { class: "side", "aria-label": compared.length === 1 ? "network" : number ? "right network" : "left network" },
      el("div", { class: "which" }, side.which, robustness), side.known,
      el("div", { class: "pictures" }, captioned(side.pictures[2], el("b", {}, "The image"), side.clean),
        captioned(side.pictures[0], el("b", {}, "Attacked"), side.attacked), captioned(side.pictures[1], el("b", {}, "Change × 10"))),
      side.verdict, side.radius, side.bars, side.curve);
    return side;
  });

  const chosenTarget = () => (settings.target === "" ? null : Number(settings.target));
  // one step of a side's attack: the image, what was added, probabilities
  const showStep = (side, wanted) => {
    const { trace, aim, target } = side, step = Math.min(wanted, trace.length - 1);
    if (step < 0) return;
    const { now, probabilities } = trace[step], read = argmax(probabilities);
    paintImage(side.pictures[0], now, shape);
    paintImage(side.pictures[1], now, shape, image);
    paintImage(side.pictures[2], image, shape);
    side.attacked.textContent = `reads “${classes[read]}” (${percent(probabilities[read], 0)})`;
    side.pictures[0].setAttribute("aria-label", `the image after step ${step}, read as ${classes[read]}`);
    showProbabilities(side.bars, probabilities, classes, aim);
    drawTrace(side.curve, trace, classes, aim, target, step);
  };
  const shown = slider("Show step", { min: 0, max: 10, step: 1, value: 10, onchange: (v) => sides.forEach((side) => showStep(side, v)) });

  const run = latest(async (current) => {
    for (const side of sides) {
      const { network, setting } = side, known = network.measured(setting);
      const threats = Object.entries(known.robust).map(([threat, figure]) => `, ${plusMinus(figure)} under ${threat}`).join("");
      const who = network.client == null ? "Reads" : "The clients’ own networks read";
      side.known.textContent = `${who} ${plusMinus(known.standard)} of ${known.standard.images?.toLocaleString("en") ?? "its"} test images right${threats}` +
        (network.mixes ? ` (at λ = ${known.robustness}).` : ".");
      const clean = await network.logits(image, setting);
      if (!current()) return;
      performance.mark("prediction");
      const answer = argmax(clean), sure = softmax(clean)[answer];
      side.clean.textContent = `reads “${classes[answer]}” (${percent(sure, 0)})${label === null ? "" : answer === label ? ", right" : ", wrong"}`;
      const aim = label ?? answer, trace = [], target = chosenTarget(), epsilon = settings.epsilon / 255;
      const watch = (step, now, logits) => { trace.push({ now, probabilities: softmax(logits) }); return current(); };
      const result = settings.attack === "square"
        ? await square(network, image, aim, { epsilon, queries: settings.steps * 20 }, setting, watch)
        : await pgd(network, image, aim, settings.attack === "fgsm"
          ? { epsilon, steps: 1, step: epsilon, start: false, target }
          : { epsilon, steps: settings.steps, target }, setting, watch);
      if (!current()) return;
      if (settings.attack === "square") trace.push({ now: result.image, probabilities: softmax(result.logits) });
      Object.assign(side, { trace, aim, target });
      const longest = Math.max(1, ...sides.map((s) => s.trace.length - 1));
      shown.limit(longest);
      shown.set(longest);
      sides.forEach((s) => showStep(s, longest));
      const after = argmax(result.logits), holds = target === null || target === aim ? after === aim : after !== target;
      side.verdict.textContent = holds ? (after === aim ? `Holds: still “${classes[after]}”` : `Misses its aim: now “${classes[after]}”`) : `Fooled: now “${classes[after]}”`;
      side.verdict.dataset.holds = holds;
      side.radius.textContent = "";
      side.box.dataset.ready = "yes";
    }
  });

  const findRadius = latest(async (current) => {
    for (const side of sides) {
      side.radius.textContent = "Searching the smallest radius …";
      const clean = argmax(await side.network.logits(image, side.setting)), target = chosenTarget();
      if (label !== null && clean !== label && target === null) {
        side.radius.textContent = "It is misread without any attack.";
        continue;
      }
      const found = await smallestRadius(side.network, image, label ?? clean, { target }, side.setting);
      if (!current()) return;
      side.radius.textContent = found === null
        ? "PGD-20 does not succeed up to ε = 64/255."
        : `Smallest ε at which PGD-20 succeeds: ${Math.round(found * 255)}/255.`;
    }
  });

  const pad = drawingPad(shape, (drawn) => { image = drawn; label = null; from = null; mark(); run(); });
  const thumbnails = el("div", { class: "thumbnails", role: "group", "aria-label": "images" });
  const domains = [...new Set(images.map((i) => i.domain))];
  const mark = () => thumbnails.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", b.dataset.at === String(from)));
  const showThumbnails = (domain) => {
    thumbnails.replaceChildren(...images.map((i, at) => {
      if (i.domain !== domain) return null;
      const canvas = picture("");
      paintImage(canvas, i.pixels, shape);
      return button(canvas, () => { image = i.pixels; label = i.label; from = at; mark(); run(); },
        { class: "thumbnail", "data-at": at, "aria-label": `${classes[i.label]}, ${i.domain}` });
    }).filter(Boolean));
    mark();
  };
  showThumbnails(images[from].domain);
  const strength = slider("Steps", { min: 1, max: 50, step: 1, value: settings.steps,
    show: (v) => (settings.attack === "square" ? `${20 * v} queries` : settings.attack === "fgsm" ? "1" : String(v)),
    onchange: (v) => { settings.steps = v; run(); } });
  const aims = choice("Aim at", [["", "any other class"], ...classes.map((c, at) => [at, c])], "", (v) => { settings.target = v; run(); });

  run();
  return el("div", {},
    el("div", { class: "pick" }, el("div", { class: "shelf" }, choice("Images of", domains.map((d) => [d, d]), images[from].domain, showThumbnails), thumbnails), pad),
    el("div", { class: "controls six" },
      choice("Attack", [["pgd", "PGD"], ["fgsm", "FGSM (one step)"], ["square", "Square (no gradient)"]], "pgd", (v) => {
        settings.attack = v;
        aims.hidden = v === "square"; // Square is not aimed here
        if (aims.hidden) { aims.set(""); settings.target = ""; }
        strength.hidden = v === "fgsm";
        strength.set(settings.steps);
        run();
      }),
      aims,
      slider("Radius ε", { min: 0, max: 32, step: 1, value: 8, show: (v) => `${v}/255`, onchange: (v) => { settings.epsilon = v; run(); } }),
      strength, shown, button("Find the smallest ε", findRadius)),
    el("div", { class: "sides" }, ...sides.map((side) => side.box)));
}

// Probability of the true class (green), the last answer (red) and the target at every step, and a mark at the one shown.
function drawTrace(box, trace, classes, label, target, shown) {
  const end = trace[trace.length - 1].probabilities, last = argmax(end);
  const lines = [...new Set([label, target, last].filter((c) => c !== null && c !== undefined))];
  const colour = (c) => (c === label ? "c2" : c === last ? "c1" : "c0");
  const x = (step) => 44 + (trace.length > 1 ? (step / (trace.length - 1)) * 282 : 0), y = (p) => 84 - 76 * p;
  const tops = spread(lines.map((c) => y(end[c]) + 4), 13);
  fill(box, el("p", { class: "note" }, "Probability at every step of the attack"), el("svg", { class: "chart trace", viewBox: "0 0 400 104", role: "img",
    "aria-label": `probability of ${lines.map((c) => classes[c]).join(", ")} over the steps of the attack` },
    ...[1, 0.5, 0].flatMap((p) => [el("text", { class: "tick end", x: 38, y: y(p) + 4 }, percent(p, 0)), el("line", { class: "rule", x1: 44, x2: 326, y1: y(p), y2: y(p) })]),
    el("line", { class: "mark", x1: x(shown), x2: x(shown), y1: 6, y2: 84 }),
    el("text", { class: "tick", x: 44, y: 100 }, "start"),
    el("text", { class: "tick end", x: 326, y: 100 }, `step ${trace.length - 1}`),
    ...lines.map((c, at) => el("g", { class: colour(c) },
      el("polyline", { class: "curve", points: trace.map((p, step) => `${x(step)},${y(p.probabilities[c])}`).join(" ") }),
      el("circle", { cx: x(shown), cy: y(trace[shown].probabilities[c]), r: 3 }),
      el("text", { x: 333, y: tops[at] }, `“${classes[c]}” ${percent(end[c], 0)}`)))));
}

// A pad to draw a digit on, white on black: by pointer, or with the arrow keys while the pen is down (space).
function drawingPad(shape, ondraw) {
  const [channels, height, width] = shape, side = 196;
  const canvas = el("canvas", { class: "pad", width: side, height: side, tabindex: 0, role: "application",
    "aria-label": "Draw a digit: with the pointer, or with arrow keys; space puts the pen down and lifts it" });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const pen = el("span", { class: "pen" });
  const frame = el("div", { class: "padframe" }, canvas, pen, el("span", { class: "hint", "aria-hidden": "true" }, "draw here"));
  const clear = () => { context.fillStyle = "#000"; context.fillRect(0, 0, side, side); delete frame.dataset.drawn; };
  clear();
  let drawing = null, place = [side / 2, side / 2], down = false;
  const read = () => {
    const scaled = el("canvas", { width, height }).getContext("2d");
    scaled.imageSmoothingQuality = "high";
    scaled.drawImage(canvas, 0, 0, width, height);
    const data = scaled.getImageData(0, 0, width, height).data;
    const image = new Float32Array(channels * height * width);
    for (let at = 0; at < height * width; at++)
      for (let c = 0; c < channels; c++) image[c * height * width + at] = data[4 * at] / 255;
    ondraw(image);
  };
  const stroke = (start, end) => {
    Object.assign(context, { strokeStyle: "#fff", lineWidth: 16, lineCap: "round", lineJoin: "round" });
    context.beginPath();
    context.moveTo(...start);
    context.lineTo(...end);
    context.stroke();
    frame.dataset.drawn = "yes";
  };
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * side, ((event.clientY - box.top) / box.height) * side];
  };
  const showPen = () => {
    pen.style.left = `${(100 * place[0]) / side}%`;
    pen.style.top = `${(100 * place[1]) / side}%`;
    pen.dataset.down = down;
  };
  showPen();
  canvas.addEventListener("pointerdown", (event) => { drawing = placeOf(event); stroke(drawing, drawing); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    const next = placeOf(event);
    stroke(drawing, next);
    drawing = next;
  });
  const lift = () => { if (drawing) { drawing = null; read(); } };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-7, 0], ArrowRight: [7, 0], ArrowUp: [0, -7], ArrowDown: [0, 7] }[event.key];
    if (event.key === " ") {
      down = !down;
      if (down) { stroke(place, place); read(); }
    } else if (by) {
      const next = place.map((v, axis) => clamp(v + by[axis], 8, side - 8));
      if (down) { stroke(place, next); read(); }
      place = next;
    } else return;
    event.preventDefault();
    showPen();
  });
  return el("div", { class: "padbox" }, el("span", {}, "Or draw a digit"), frame, button("Clear", clear));
}
