// Draw and attack: one image, two networks side by side.

function attackRoom(page) {
  const { shape, classes, images, networks } = page;
  const robustest = networks.find((n) => n.mixes) ?? networks[networks.length - 1];
  let image = images[0].pixels, label = images[0].label, from = 0;
  const settings = { attack: "pgd", epsilon: 8, steps: 20, target: "" };

  const sides = [networks[0], robustest].map((network, number) => {
    const side = { network, setting: { width: 1, robustness: number && network.mixes ? 1 : network.robustness } };
    side.clean = el("p", { class: "verdict" });
    side.pictures = [picture("the image after the attack"), picture("what the attack added, times ten")];
    side.bars = el("div", { class: "bars", role: "group", "aria-label": "probability of each class after the attack" });
    side.curve = el("div");
    side.verdict = el("p", { class: "verdict", "aria-live": "polite" });
    side.radius = el("p", { class: "note", "aria-live": "polite" });
    side.which = choice(number ? "Network on the right" : "Network on the left",
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
    side.box = el("section", { class: "side" }, side.which, robustness, side.clean,
      el("div", { class: "pair" }, ...side.pictures), side.verdict, side.bars, side.curve, side.radius);
    return side;
  });

  const run = latest(async (current) => {
    for (const side of sides) {
      const { network, setting } = side;
      const clean = await network.logits(image, setting);
      if (!current()) return;
      const answer = argmax(clean), sure = softmax(clean)[answer];
      side.clean.textContent = `Reads “${classes[answer]}” (${percent(sure, 0)})${label === null ? "" : answer === label ? ", right" : ", wrong"}`;
      const aim = label ?? answer, trace = [];
      const target = settings.target === "" ? null : Number(settings.target);
      const watch = (step, now, logits) => { trace.push(softmax(logits)); return current(); };
      const epsilon = settings.epsilon / 255;
      const result = settings.attack === "square"
        ? await square(network, image, aim, { epsilon, queries: settings.steps * 20 }, setting, watch)
        : await pgd(network, image, aim, settings.attack === "fgsm"
          ? { epsilon, steps: 1, step: epsilon, start: false, target }
          : { epsilon, steps: settings.steps, target }, setting, watch);
      if (!current()) return;
      paintImage(side.pictures[0], result.image, shape);
      paintImage(side.pictures[1], result.image, shape, image);
      showProbabilities(side.bars, softmax(result.logits), classes, aim);
      drawTrace(side.curve, trace, classes, aim, target);
      const after = argmax(result.logits);
      side.verdict.textContent = after === aim ? `Holds: still “${classes[after]}”` : `Fooled: now “${classes[after]}”`;
      side.verdict.dataset.holds = after === aim;
      side.radius.textContent = "";
      side.box.dataset.ready = "yes";
    }
  });

  const findRadius = latest(async (current) => {
    for (const side of sides) {
      side.radius.textContent = "Searching the smallest radius …";
      const clean = argmax(await side.network.logits(image, side.setting));
      const target = settings.target === "" ? null : Number(settings.target);
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

  const pad = drawingPad(shape, (drawn) => { image = drawn; label = null; from = null; run(); });
  const thumbnails = el("div", { class: "thumbnails", role: "group", "aria-label": "images" });
  const domains = [...new Set(images.map((i) => i.domain))];
  const showThumbnails = (domain) => thumbnails.replaceChildren(...images.map((i, at) => {
    if (i.domain !== domain) return null;
    const canvas = picture("");
    paintImage(canvas, i.pixels, shape);
    return button(canvas, () => { image = i.pixels; label = i.label; from = at; run(); },
      { class: "thumbnail", "aria-label": `${classes[i.label]}, ${i.domain}` });
  }).filter(Boolean));
  showThumbnails(domains[0]);

  run();
  return el("div", {},
    el("div", { class: "controls" },
      choice("Images of", domains.map((d) => [d, d]), domains[0], showThumbnails),
      choice("Attack", [["pgd", "PGD"], ["fgsm", "FGSM"], ["square", "Square (no gradient)"]], "pgd", (v) => { settings.attack = v; run(); }),
      slider("Radius ε", { min: 0, max: 32, step: 1, value: 8, show: (v) => `${v}/255`, onchange: (v) => { settings.epsilon = v; run(); } }),
      slider("Steps", { min: 1, max: 50, step: 1, value: 20, onchange: (v) => { settings.steps = v; run(); } }),
      choice("Aim at", [["", "any other class"], ...classes.map((c, at) => [at, c])], "", (v) => { settings.target = v; run(); }),
      button("Find the smallest ε", findRadius)),
    el("div", { class: "pick" }, thumbnails, pad),
    el("div", { class: "sides" }, ...sides.map((side) => side.box)));
}

// Probability of the true class, the target and the answer at every step.
function drawTrace(box, trace, classes, label, target) {
  const last = argmax(trace[trace.length - 1]);
  const shown = [...new Set([label, target, last].filter((c) => c !== null))];
  const x = (step) => 30 + (trace.length > 1 ? (step / (trace.length - 1)) * 250 : 0), y = (p) => 84 - 76 * p;
  const lines = shown.map((c, at) => el("g", { class: `c${at}` },
    el("polyline", { class: "curve", points: trace.map((p, step) => `${x(step)},${y(p[c])}`).join(" ") }),
    el("text", { x: 286, y: y(trace[trace.length - 1][c]) + 4 }, classes[c])));
  box.replaceChildren(el("svg", { class: "chart", viewBox: "0 0 330 104", role: "img",
    "aria-label": `probability of ${shown.map((c) => classes[c]).join(", ")} over the steps of the attack` },
    el("text", { class: "tick end", x: 26, y: 12 }, "1"), el("text", { class: "tick end", x: 26, y: 88 }, "0"),
    el("line", { class: "rule", x1: 30, x2: 280, y1: 84, y2: 84 }),
    el("text", { class: "tick", x: 30, y: 100 }, "start"),
    el("text", { class: "tick end", x: 280, y: 100 }, `step ${trace.length - 1}`), ...lines));
}

// A pad to draw a digit on: white on black, by pointer; the keys draw nothing but clear it.
function drawingPad(shape, ondraw) {
  const [channels, height, width] = shape;
  const canvas = el("canvas", { class: "pad", width: 196, height: 196, role: "img", "aria-label": "draw a digit here" });
  const context = canvas.getContext("2d");
  const clear = () => { context.fillStyle = "#000"; context.fillRect(0, 0, 196, 196); };
  clear();
  let drawing = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * 196, ((event.clientY - box.top) / box.height) * 196];
  };
  const read = () => {
    const small = el("canvas", { width, height });
    const scaled = small.getContext("2d");
    scaled.imageSmoothingQuality = "high";
    scaled.drawImage(canvas, 0, 0, width, height);
    const data = scaled.getImageData(0, 0, width, height).data;
    const image = new Float32Array(channels * height * width);
    for (let at = 0; at < height * width; at++)
      for (let c = 0; c < channels; c++) image[c * height * width + at] = data[4 * at] / 255;
    ondraw(image);
  };
  canvas.addEventListener("pointerdown", (event) => { drawing = place(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    const next = place(event);
    Object.assign(context, { strokeStyle: "#fff", lineWidth: 16, lineCap: "round", lineJoin: "round" });
    context.beginPath();
    context.moveTo(...drawing);
    context.lineTo(...next);
    context.stroke();
    drawing = next;
  });
  canvas.addEventListener("pointerup", () => { if (drawing) { drawing = null; read(); } });
  return el("div", { class: "padbox" }, canvas, button("Clear", clear));
}
