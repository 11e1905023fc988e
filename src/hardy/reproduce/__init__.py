"""Published tables and figures, repeated by one command: `hardy reproduce PAPER/TABLE`.

    experiments/PAPER/paper.toml         claim, and every table and figure of the paper with where it is measured
    experiments/PAPER/TABLE.toml         rows by name, columns, the paper's figures
    experiments/PAPER/results/TABLE/     what was measured: one JSON a row and seed
    experiments/PAPER/README.md          tables between markers, written from the two

The folder belongs to a checkout, not to the installed package: tables, results and pages change together.
"""
