// Small pieces every room is made of. Text is always set as text, never as markup.

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "title", "circle", "line", "path", "text", "rect", "g", "polyline"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  fill(made, ...children);
  return made;
}

// Puts these into a box in place of what was there; null is nothing.
function fill(box, ...children) {
  box.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return box;
}

const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`);

// 79.2 ± 1.1 %: an accuracy and its standard error
const plusMinus = (figure) => !figure || figure.mean === null ? "–"
  : figure.standard_error ? `${(100 * figure.mean).toFixed(1)} ± ${(100 * figure.standard_error).toFixed(1)} %` : percent(figure.mean);

let controls = 0;

function slider(label, { min, max, step, value, show = (v) => String(v), onchange }) {
  const id = `control${controls++}`;
  const output = el("output", { for: id }, show(value));
  const input = el("input", { type: "range", id, min, max, step, value });
  input.addEventListener("input", () => {
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
    onchange(Number(input.value));
  });
  input.setAttribute("aria-valuetext", output.textContent);
  const box = el("div", { class: "control" }, el("label", { for: id }, label), input, output);
  return Object.assign(box, {
    get: () => Number(input.value),
    set: (v) => { input.value = v; output.textContent = show(Number(v)); input.setAttribute("aria-valuetext", output.textContent); },
    limit: (v) => { input.max = v; },
  });
}

function choice(label, options, value, onchange) {
  const id = `control${controls++}`;
  const select = el("select", { id, onchange: () => onchange(select.value) },
    ...options.map(([key, words]) => el("option", { value: key, selected: String(key) === String(value) }, words)));
  return Object.assign(el("div", { class: "control" }, el("label", { for: id }, label), select), {
    get: () => select.value,
    set: (v) => { select.value = v; },
  });
}

const button = (words, onclick, attributes = {}) => el("button", { type: "button", onclick, ...attributes }, words);

// An image [C, H, W] in [0, 1] on a canvas; `change` shows (image − from) × 10 around mid-grey.
function paintImage(canvas, image, [channels, height, width], from = null) {
  canvas.width = width;
  canvas.height = height;
  const pixels = new ImageData(width, height);
  for (let at = 0; at < height * width; at++)
    for (let c = 0; c < 3; c++) {
      const place = (channels === 1 ? 0 : c) * height * width + at;
      const value = from ? 0.5 + 10 * (image[place] - from[place]) : image[place];
      pixels.data[4 * at + c] = Math.round(255 * clamp(value, 0, 1));
      pixels.data[4 * at + 3] = 255;
    }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

const picture = (words) => el("canvas", { class: "picture", role: "img", "aria-label": words });

// A picture over what is said of it.
const captioned = (drawn, ...words) => el("figure", {}, drawn, el("figcaption", {}, ...words));

// About four round numbers that enclose low and high.
function roundTicks(low, high) {
  const raw = (high - low || Math.abs(high) || 1) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999), first = Math.floor(low / step + 1e-9);
  return Array.from({ length: Math.max(2, Math.ceil(high / step - 1e-9) - first + 1) }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

// Heights of lines of text, moved down until none overlap.
function spread(tops, least) {
  const placed = tops.slice(), order = tops.map((_, at) => at).sort((a, b) => tops[a] - tops[b]);
  order.forEach((at, n) => { if (n) placed[at] = Math.max(placed[at], placed[order[n - 1]] + least); });
  return placed;
}

// Probabilities of all classes as bars: the true class green, a wrong answer red, the answer in bold.
function showProbabilities(box, probabilities, classes, label) {
  const answer = argmax(probabilities);
  fill(box, probabilities.map((p, at) =>
    el("div", { class: `bar${at === answer ? " answer" : ""}` },
      el("span", {}, classes[at]),
      el("span", { class: "track" }, el("span", { class: at === label ? "fill right" : at === answer ? "fill wrong" : "fill", style: `width:${100 * p}%` })),
      el("span", { class: "value" }, percent(p, 0)))));
}

// Runs only the newest of calls that come faster than they finish.
function latest(work) {
  let token = 0;
  return async (...given) => {
    const mine = ++token;
    await work(() => mine === token, ...given);
  };
}

const nextFrame = () => new Promise((done) => setTimeout(done, 0));
