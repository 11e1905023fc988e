// Attacks on one image in [0, 1]. Each calls watch(step, image, logits) as it goes and stops when `watch` returns false.

function randomSource(seed) {
  // mulberry32: small, and the same in every browser
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Gradient to the image of the cross-entropy of `label`.
async function lossGradient(network, image, logits, label, setting) {
  const cotangent = Float32Array.from(softmax(logits));
  cotangent[label] -= 1;
  return network.pullBack(image, cotangent, setting);
}

// Projected gradient: up the loss of the label, or down that of a target. steps = 1 and no random start: FGSM.
async function pgd(network, image, label, options, setting, watch = () => true) {
  const { epsilon, steps, step = Math.min(1, 2.5 / steps) * epsilon, target = null, start = true, seed = 1 } = options;
  const random = randomSource(seed);
  const bound = (value, at) => clamp(clamp(value, image[at] - epsilon, image[at] + epsilon), 0, 1);
  let now = start ? image.map((value, at) => bound(value + (2 * random() - 1) * epsilon, at)) : image.slice();
  let logits = await network.logits(now, setting);
  if (watch(0, now, logits) === false) return { image: now, logits };
  for (let number = 1; number <= steps; number++) {
    const gradient = await lossGradient(network, now, logits, target ?? label, setting);
    const towards = target === null ? step : -step;
    now = now.map((value, at) => bound(value + towards * Math.sign(gradient[at]), at));
    logits = await network.logits(now, setting);
    if (watch(number, now, logits) === false) break;
  }
  return { image: now, logits };
}

// Square (Andriushchenko et al. 2020): random squares of ±ε, kept when the margin falls. It sees no gradient.
async function square(network, image, label, { epsilon, queries, seed = 1 }, setting, watch = () => true) {
  const [channels, height, width] = network.shape;
  const random = randomSource(seed);
  const sign = () => (random() < 0.5 ? -epsilon : epsilon);
  const paint = (base, top, left, side) => {
    const next = base.slice();
    for (let c = 0; c < channels; c++) {
      const moved = sign();
      for (let row = top; row < Math.min(top + side, height); row++)
        for (let column = left; column < Math.min(left + side, width); column++) {
          const at = (c * height + row) * width + column;
          next[at] = clamp(image[at] + moved, 0, 1);
        }
    }
    return next;
  };
  let best = image.slice();
  for (let c = 0; c < channels; c++)
    for (let column = 0; column < width; column++) {
      const moved = sign();
      for (let row = 0; row < height; row++) {
        const at = (c * height + row) * width + column;
        best[at] = clamp(image[at] + moved, 0, 1);
      }
    }
  let logits = await network.logits(best, setting);
  const halvings = [10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000];
  for (let query = 1; query < queries; query++) {
    if (watch(query, best, logits) === false || margin(logits, label) < 0) break;
    const done = (query / queries) * 10000;
    const share = 0.8 * 0.5 ** halvings.filter((point) => done > point).length;
    const side = clamp(Math.round(Math.sqrt(share * height * width)), 1, Math.min(height, width));
    const tried = paint(
      best, Math.floor(random() * (height - side + 1)), Math.floor(random() * (width - side + 1)), side
    );
    const answer = await network.logits(tried, setting);
    if (margin(answer, label) < margin(logits, label)) [best, logits] = [tried, answer];
  }
  return { image: best, logits };
}

// The smallest radius at which PGD-20 is found to succeed, to 1/255, or null up to `largest`.
async function smallestRadius(network, image, label, { target = null, largest = 64 / 255 }, setting) {
  const succeeds = async (epsilon) => {
    let won = false;
    const judge = (step, now, logits) => {
      won = target === null ? argmax(logits) !== label : argmax(logits) === target;
      return !won;
    };
    await pgd(network, image, label, { epsilon, steps: 20, target }, setting, judge);
    return won;
  };
  let high = 1;
  while (!(await succeeds(high / 255))) {
    if (high >= largest * 255) return null;
    high = Math.min(high * 2, Math.round(largest * 255));
  }
  let low = high === 1 ? 0 : high / 2;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (await succeeds(middle / 255)) high = middle;
    else low = middle;
  }
  return high / 255;
}
