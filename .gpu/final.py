import json, sys

found = json.load(open(sys.argv[1]))
best = {}
for n, r in found.items():
    if "error" in r:
        continue
    m = n.split(",")[0]
    v = r["best"]["validation_accuracy"]
    if m not in best or v > best[m][0]:
        best[m] = (v, n, r["overrides"])
rows = {}
for m, (v, n, o) in best.items():
    print(m, n, round(v, 4))
    rows[m] = [x for x in o if not x.startswith("seed=")]
head = """# The table of README.md, with the rates that grid_rates.toml chose on validation rows:
# python experiments/grid.py experiments/fedopt/grid.toml --out OUT.json
experiment = "mini_digits.toml"
seeds = [0, 1, 2]

[rows]
"""
open(sys.argv[2], "w").write(head + "".join(json.dumps(m) + " = " + json.dumps(o) + "\n" for m, o in rows.items()))
