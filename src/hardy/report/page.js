// Values on hover and by keys, curves on and off, a filter by domain and client. The page can be read without it.
"use strict";

const make = (tag, attributes = {}, text = "") => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
};
const tip = make("div", { class: "tip", role: "status", hidden: "" });
document.body.append(tip);

for (const chart of document.querySelectorAll("svg.chart")) {
  const curves = [...chart.querySelectorAll("path[data-x]")].map((path) => ({
    name: path.dataset.name, x: path.dataset.x.split("|"), y: path.dataset.y.split("|"),
    places: path.getAttribute("d").slice(1).split(" ").filter((_, at) => at % 2 === 0).map(Number),
  }));
  if (!curves.length) continue;
  const off = new Set(), across = [...new Set(curves.flatMap((c) => c.places))].sort((a, b) => a - b);
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "line");
  mark.setAttribute("class", "mark");
  for (const [name, value] of [["y1", "0"], ["y2", "100%"], ["visibility", "hidden"]]) mark.setAttribute(name, value);
  chart.append(mark);
  let at = across.length - 1;
  const show = (left, top) => {
    const place = across[at], lines = [];
    for (const curve of curves) {
      if (off.has(curve.name)) continue;
      const nearest = curve.places.reduce((best, p, n) => (Math.abs(p - place) < Math.abs(curve.places[best] - place) ? n : best), 0);
      if (Math.abs(curve.places[nearest] - place) > 20) continue;
      if (!lines.length) lines.push(make("b", {}, curve.x[nearest]));
      lines.push(make("span", {}, `${curve.name} ${curve.y[nearest]}`));
    }
    mark.setAttribute("x1", `${place / 10}%`);
    mark.setAttribute("x2", `${place / 10}%`);
    mark.setAttribute("visibility", "visible");
    tip.replaceChildren(...lines);
    tip.hidden = !lines.length;
    tip.style.left = `${Math.min(left + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${top + 14}px`;
  };
  const leave = () => { tip.hidden = true; mark.setAttribute("visibility", "hidden"); };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), place = (1000 * (event.clientX - box.left)) / box.width;
    at = across.reduce((best, p, n) => (Math.abs(p - place) < Math.abs(across[best] - place) ? n : best), 0);
    show(event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", leave);
  chart.tabIndex = 0;
  chart.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: across.length - 1 }[event.key];
    if (to === undefined || event.target !== chart) return;
    event.preventDefault();
    at = Math.min(across.length - 1, Math.max(0, to));
    const box = chart.getBoundingClientRect();
    show(box.left + (box.width * across[at]) / 1000, box.top);
  });
  chart.addEventListener("blur", leave);
  for (const label of curves.length > 1 ? chart.querySelectorAll("text[data-name]") : []) {
    const name = label.dataset.name;
    for (const [key, value] of [["role", "button"], ["tabindex", "0"], ["aria-pressed", "true"], ["class", `${label.getAttribute("class")} switch`]])
      label.setAttribute(key, value);
    const turn = () => {
      off.has(name) ? off.delete(name) : off.add(name);
      label.setAttribute("aria-pressed", !off.has(name));
      for (const part of chart.querySelectorAll("[data-name]"))
        if (part.dataset.name === name) part.classList.toggle("off", off.has(name));
      leave();
    };
    label.addEventListener("click", turn);
    label.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); }
    });
  }
}

const filter = document.querySelector(".filter");
if (filter) {
  const { domains, clients } = JSON.parse(filter.dataset.known);
  const list = (words, options) => {
    const select = make("select");
    select.append(...options.map(([value, text]) => make("option", { value }, text)));
    const label = make("label", {}, words);
    label.append(select);
    filter.append(label);
    return select;
  };
  const domain = list("Domain ", [["", "all"], ...domains.map((name) => [name, name])]);
  const client = list("Client ", [["", "all"], ...clients.map((c) => [String(c.client), `${c.client} (${c.domain})`])]);
  const words = make("p", { class: "note", role: "status" });
  filter.append(words);
  filter.hidden = false;
  const apply = () => {
    const chosen = clients.find((c) => String(c.client) === client.value), wanted = chosen?.domain ?? domain.value;
    words.textContent = chosen ? `Client ${chosen.client}, ${chosen.domain}: ${chosen.words}.` : "";
    for (const part of document.querySelectorAll("[data-name]"))
      part.classList.toggle("dim", Boolean(wanted) && domains.includes(part.dataset.name) && part.dataset.name !== wanted);
    for (const dot of document.querySelectorAll(".chart .dot")) {
      const own = /^client (\S+?):? /.exec(`${dot.textContent} `)?.[1];
      dot.classList.toggle("dim", Boolean(chosen) && own !== undefined && own !== client.value);
      dot.classList.toggle("chosen", Boolean(chosen) && own === client.value);
    }
    for (const table of document.querySelectorAll("table")) {
      const heads = [...table.querySelectorAll("th")].map((cell) => cell.textContent);
      for (const cell of table.querySelectorAll("th, td")) {
        const head = heads[cell.cellIndex];
        cell.classList.toggle("dim", Boolean(wanted) && domains.includes(head) && head !== wanted);
      }
    }
    for (const figure of document.querySelectorAll("figure[data-client]")) {
      const own = clients.find((c) => String(c.client) === figure.dataset.client);
      figure.hidden = chosen ? figure.dataset.client !== client.value : Boolean(wanted) && own?.domain !== wanted;
      if (chosen && !figure.hidden) figure.closest("details")?.setAttribute("open", "");
    }
  };
  domain.addEventListener("change", () => { client.value = ""; apply(); });
  client.addEventListener("change", apply);
}
