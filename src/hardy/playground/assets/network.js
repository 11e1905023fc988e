// What the page carries, unpacked, and networks that run on onnxruntime-web.

async function unpack(id) {
  // base64 of gzip, in a <script> that is data
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

async function loadRuntime() {
  const source = URL.createObjectURL(new Blob([await unpack("runtime")], { type: "text/javascript" }));
  const ort = await import(source);
  URL.revokeObjectURL(source);
  Object.assign(ort.env.wasm, { numThreads: 1, proxy: false, wasmBinary: (await unpack("wasm")).buffer });
  ort.env.logLevel = "error";
  return ort;
}

let queue = Promise.resolve(); // the runtime takes one call at a time

class Network {
  // One file, many networks: the mean of as many bases as the width asks for, at a robustness λ.
  // `piece` gives the bytes at a place; weights lie apart, so that a network and its gradient share them.
  constructor(ort, description, shape, classes, piece) {
    Object.assign(this, { ort, shape, classes, piece, ...description });
    this.size = shape.reduce((a, b) => a * b, 1);
    this.sessions = new Map();
  }

  get mixes() {
    return this.robustness !== null;
  }

  // the measured setting that lies nearest
  measured({ width = 1, robustness = null } = {}) {
    const away = (row) => Math.abs(row.width - width) + (this.mixes ? Math.abs(row.robustness - (robustness ?? this.robustness)) : 0);
    return this.settings.reduce((best, row) => (away(row) < away(best) - 1e-12 ? row : best));
  }

  basesAt(width) {
    return Math.max(1, this.widths.filter((known) => known <= width + 1e-9).length);
  }

  session(base, kind) {
    const key = `${base} ${kind}`;
    if (!this.sessions.has(key)) {
      const { model, weights } = this.bases[base][kind];
      const externalData = weights.map((place, at) => ({ path: String(at), data: this.piece(place) }));
      this.sessions.set(key, this.ort.then(({ InferenceSession }) =>
        InferenceSession.create(this.piece(model), { externalData, graphOptimizationLevel: "all" })));
    }
    return this.sessions.get(key);
  }

  run(kind, x, setting, cotangent) {
    const task = queue.then(() => this.runNow(kind, x, setting, cotangent));
    queue = task.catch(() => {});
    return task;
  }

  async runNow(kind, x, { width = 1, robustness = null } = {}, cotangent = null) {
    const count = x.length / this.size, { Tensor } = await this.ort;
    const given = { images: new Tensor("float32", x, [count, ...this.shape]) };
    if (cotangent) given.cotangent = new Tensor("float32", cotangent, [count, this.classes]);
    if (this.mixes) given.robustness = new Tensor("float32", [robustness ?? this.robustness], []);
    const bases = this.basesAt(width);
    let total = null;
    for (let base = 0; base < bases; base++) {
      const answer = await (await this.session(base, kind)).run(given);
      const part = answer[kind === "forward" ? "logits" : "gradient"].data;
      total = total ? total.map((value, at) => value + part[at]) : Float32Array.from(part);
    }
    const scale = (this.factor ?? 1) / bases;
    return total.map((value) => value * scale);
  }

  // [N, K] of images [N, C, H, W] in [0, 1]
  logits(x, setting) {
    return this.run("forward", x, setting);
  }

  // the gradient to the images of Σ cotangent · logits
  pullBack(x, cotangent, setting) {
    return this.run("gradient", x, setting, cotangent);
  }
}

function softmax(logits) {
  const top = Math.max(...logits);
  const raised = Array.from(logits, (z) => Math.exp(z - top));
  const sum = raised.reduce((a, b) => a + b, 0);
  return raised.map((value) => value / sum);
}

const argmax = (values) => values.reduce((best, value, at) => (value > values[best] ? at : best), 0);

// logit of the class minus the largest other one: below 0 the image is misread
function margin(logits, label) {
  let other = -Infinity;
  logits.forEach((value, at) => { if (at !== label && value > other) other = value; });
  return logits[label] - other;
}
