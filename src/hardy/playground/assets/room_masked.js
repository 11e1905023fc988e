// Would you believe it? The same network twice, once with its gradients masked.

function maskedRoom(page) {
  const { masked, networks, images, shape, classes } = page;
  const honest = networks[masked.network];
  const hidden = new Network(page.ort, { ...honest, sessions: undefined, factor: masked.factor }, shape, classes.length, honest.piece);
  hidden.sessions = honest.sessions; // the same files: only the logits are multiplied
  const row = (name, cells) => el("tr", {}, el("td", { class: "left" }, name), ...cells.map((n) => el("td", {}, n === null ? "–" : `${n} of ${chosen.length}`)));
  const rows = el("tbody"), progress = el("p", { class: "note", "aria-live": "polite" }), chosen = images.filter((_, at) => at % Math.ceil(images.length / 12) === 0);
  const attacks = [
    ["no attack", (network, image, label) => ({ image })],
    ["PGD, 20 steps", (network, image, label) => pgd(network, image, label, { epsilon: 8 / 255, steps: 20, start: false }, {})],
    ["Square, 300 queries", (network, image, label) => square(network, image, label, { epsilon: 8 / 255, queries: 300 }, {})],
  ];
  rows.replaceChildren(...attacks.map(([name]) => row(name, [null, null])));
  const run = latest(async (current) => {
    delete rows.dataset.ready;
    for (const [at, [name, attack]] of attacks.entries()) {
      const cells = [];
      for (const network of [honest, hidden]) {
        let standing = 0;
        for (const [number, { pixels, label }] of chosen.entries()) {
          progress.textContent = `${name}: image ${number + 1} of ${chosen.length}`;
          const { image } = await attack(network, pixels, label);
          standing += argmax(await network.logits(image, {})) === label;
          await nextFrame();
          if (!current()) return;
        }
        cells.push(standing);
        rows.children[at].replaceWith(row(name, [...cells, null].slice(0, 2)));
      }
    }
    progress.textContent = "The right column looks robust under PGD. It is the left network with its logits multiplied by " +
      `${masked.factor.toLocaleString("en")}: the softmax saturates, the gradient is zero, and PGD has nowhere to go. Square needs no gradient.`;
    rows.dataset.ready = "yes";
  });
  progress.textContent = `On the right the same network, its logits multiplied by ${masked.factor.toLocaleString("en")}. Its answers are the same. Is it robust?`;
  return el("div", {},
    el("p", { class: "action" }, button(`Attack both on ${chosen.length} images`, run)),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "left" }, "images read right, ε = 8/255"), el("th", {}, honest.name), el("th", {}, "the same, masked"))), rows)),
    progress,
    el("h3", {}, "What the red flags of hardy evaluate say of the masked one"),
    ...masked.flags.map((flag) => el("details", { open: true }, el("summary", {}, flag.name.replaceAll("_", " ")), el("p", { class: "note" }, flag.message), el("p", { class: "note" }, flag.advice))));
}
