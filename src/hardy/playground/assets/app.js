// The page: five rooms behind tabs, each built when it is first opened.

const ROOMS = [
  ["attack", "Draw and attack", attackRoom, "An attacker may change every pixel by at most ε. See what it takes to fool each network.", "https://arxiv.org/abs/1706.06083", "Madry et al. 2018"],
  ["width", "One file, many networks", widthRoom, "Split-Mix trains small networks, the bases, and mixes them. Width and robustness are chosen after training.", "https://openreview.net/forum?id=_QLmakITKg", "Split-Mix, Hong et al. 2022"],
  ["clients", "Who is served well?", clientsRoom, "A mean hides who is served badly. Choose a client.", "https://arxiv.org/abs/2106.10196", "FedRBN, Hong et al. 2023"],
  ["liars", "Liars’ table", liarsRoom, "Some clients send what they like. Watch which aggregation rule stays with the honest ones.", "https://arxiv.org/abs/2302.01772", "NNM, Allouah et al. 2023"],
  ["masked", "Would you believe it?", maskedRoom, "A network can look robust because the attack is blind.", "https://arxiv.org/abs/1802.00420", "Athalye et al. 2018"],
];

const LIVE = ["live", "Live", liveRoom, "What the run says of each round, as it trains.", "https://arxiv.org/abs/1602.05629", "FedAvg, McMahan et al. 2017"];

async function start() {
  const content = JSON.parse(new TextDecoder().decode(await unpack("content"))), binary = await unpack("binary");
  const piece = ([start, length]) => binary.subarray(start, start + length);
  const pixels = (place) => Float32Array.from(piece(place), (v) => v / 255);
  const page = { shape: content.shape, classes: content.classes, masked: content.masked, first: content.first ?? 0, live: content.live };
  if (page.live) ROOMS.unshift(LIVE);
  page.images = content.images.map((image) => ({ ...image, pixels: pixels(image.x) }));
  page.runs = content.runs.map((run) => ({ ...run, clients: run.clients.map((client) => ({ ...client,
    pictures: client.pictures.map((p) => ({ ...p, clean: pixels(p.at), attacked: pixels(p.attacked_at) })) })) }));
  page.ort = nextFrame().then(loadRuntime); // the page is drawn first
  page.ort.catch(failed);
  page.networks = content.networks.map((n) => new Network(page.ort, n, content.shape, content.classes.length, piece));
  page.tools = { RULES, pgd, square, smallestRadius, argmax };
  window.playground = page; // for tests, and for whoever opens the console
  const opened = new Map();
  const tabs = document.getElementById("tabs"), main = document.getElementById("room");
  const open = (id, focus = false) => {
    const [, title, build, words, address, paper] = ROOMS.find(([name]) => name === id) ?? ROOMS[0];
    for (const tab of tabs.children) {
      const mine = tab.id === `tab-${id}`;
      tab.setAttribute("aria-selected", mine);
      tab.tabIndex = mine ? 0 : -1;
      if (mine && focus) tab.focus();
      if (mine) tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft - 24; // on a phone the tabs are wider than the screen
    }
    if (!opened.has(id)) {
      const link = el("a", { class: "paper", href: address, rel: "noreferrer" }, paper);
      opened.set(id, el("div", { class: "room", role: "tabpanel", "aria-labelledby": `tab-${id}`, id: `room-${id}` },
        el("h2", { class: "unseen" }, title), el("p", { class: "about" }, words, " ", link), build(page)));
    }
    main.replaceChildren(opened.get(id));
    history.replaceState(null, "", `#${id}`);
  };
  tabs.append(...ROOMS.map(([id, title]) => el("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `room-${id}`, onclick: () => open(id),
    onkeydown: (event) => {
      const ids = ROOMS.map(([name]) => name), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const to = event.key === "Home" ? 0 : event.key === "End" ? ids.length - 1 : by ? (ids.indexOf(id) + by + ids.length) % ids.length : null;
      if (to !== null) { event.preventDefault(); open(ids[to], true); }
    } }, title)));
  open(location.hash.slice(1) || ROOMS[0][0]);
  document.body.dataset.ready = "yes";
}

function failed(error) {
  document.getElementById("room").textContent = `The page could not start: ${error.message}. It needs a browser of 2023 or later with WebAssembly.`;
  throw error;
}

start().catch(failed);
