"""Hardy over a real network, with Flower (`pip install hardy-fl[flower]`): the two halves of a Flower app.

    from hardy.flower.apps import client_app, server_app

    server, client = server_app("experiment.toml"), client_app()

Flower reports usage to its makers unless told not to; here it is told not to.
"""

import os

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
"""no telemetry, no look for updates, nothing installed at run time; a message waits 0.2 s for its process, not 1 s"""

for _name, _value in ENVIRONMENT.items():  # before anything imports flwr
    os.environ.setdefault(_name, _value)
