// Aggregation rules on points in a plane, [[x, y], ...], with the same results as Hardy's Python rules.

const columnsOf = (points) => [0, 1].map((axis) => points.map((point) => point[axis]));
const average = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const squaredDistance = (a, b) => (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2;

function middleMean(values, trim) {
  const sorted = values.slice().sort((a, b) => a - b);
  return average(sorted.slice(trim, sorted.length - trim));
}

const mean = (points) => columnsOf(points).map(average);
const coordinateMedian = (points) => columnsOf(points).map((v) => middleMean(v, Math.floor((v.length - 1) / 2)));
const trimmedMean = (points, f) => columnsOf(points).map((v) => middleMean(v, f));

function krum(points, f) {
  const scores = points.map((point) => {
    const near = points.map((other) => squaredDistance(point, other)).sort((a, b) => a - b);
    return near.slice(1, points.length - f - 1).reduce((a, b) => a + b, 0);
  });
  return points[scores.indexOf(Math.min(...scores))].slice();
}

function geometricMedian(points, iterations = 32, smoothing = 1e-6) {
  const lowerMedian = (values) => values.slice().sort((a, b) => a - b)[Math.floor((values.length - 1) / 2)];
  let distances = points.map((p) => lowerMedian(points.map((q) => Math.sqrt(squaredDistance(p, q)))));
  let centre = null;
  for (let step = 0; step <= iterations; step++) {
    const raw = distances.map((d) => 1 / Math.max(d, smoothing));
    const sum = raw.reduce((a, b) => a + b, 0);
    centre = [0, 1].map((axis) => points.reduce((total, p, at) => total + (raw[at] / sum) * p[axis], 0));
    distances = points.map((p) => Math.sqrt(squaredDistance(p, centre)));
  }
  return centre;
}

function nearestNeighbourMixing(points, f) {
  return points.map((point) => {
    const order = points.map((other, at) => [squaredDistance(point, other), at]).sort((a, b) => a[0] - b[0]);
    return mean(order.slice(0, points.length - f).map(([, at]) => points[at]));
  });
}

// name, what it computes, and the fewest clients it needs for f liars
const RULES = [
  { name: "mean", words: "one liar moves it anywhere", apply: mean, least: () => Infinity },
  { name: "coordinate median", words: "the middle of each number", apply: coordinateMedian, least: (f) => 2 * f + 1 },
  { name: "trimmed mean", words: "without the f smallest and largest", apply: trimmedMean, least: (f) => 2 * f + 1 },
  { name: "Krum", words: "the update with the nearest neighbours", apply: krum, least: (f) => 2 * f + 3 },
  { name: "geometric median", words: "least sum of distances", apply: (points) => geometricMedian(points), least: (f) => 2 * f + 1 },
  {
    name: "NNM + median",
    words: "means of the n − f nearest, then the median",
    apply: (points, f) => coordinateMedian(nearestNeighbourMixing(points, f)),
    least: (f) => 2 * f + 1,
  },
];

// The most liars among n clients for which a rule holds.
function limitOf(rule, clients) {
  let f = 0;
  while (rule.least(f + 1) <= clients) f++;
  return f;
}

// What hostile clients send, given the honest updates and their own honest ones.
const LIES = {
  "by hand": (honest, own) => own,
  "sign flipping": (honest, own) => own.map(([x, y]) => [-x, -y]),
  "fall of empires": (honest, own, factor) => own.map(() => mean(honest).map((value) => -factor * value)),
  "a little is enough": (honest, own, factor) => {
    const middle = mean(honest);
    const deviation = columnsOf(honest).map((values, axis) =>
      Math.sqrt(values.reduce((sum, v) => sum + (v - middle[axis]) ** 2, 0) / Math.max(1, values.length - 1))
    );
    return own.map(() => middle.map((value, axis) => value + factor * deviation[axis]));
  },
  mimic: (honest, own) => own.map(() => honest[0].slice()),
};

// P(more than f of the cohort lie), drawn without replacement from `clients` of whom `liars` lie.
function chanceOfMore(clients, liars, cohort, f) {
  const logFactorial = [0];
  for (let n = 1; n <= clients; n++) logFactorial.push(logFactorial[n - 1] + Math.log(n));
  const choose = (n, k) => (k < 0 || k > n ? -Infinity : logFactorial[n] - logFactorial[k] - logFactorial[n - k]);
  let chance = 0;
  for (let k = f + 1; k <= Math.min(liars, cohort); k++)
    chance += Math.exp(choose(liars, k) + choose(clients - liars, cohort - k) - choose(clients, cohort));
  return Math.min(1, chance);
}
