"""`hardy data`: which data sets are here."""

from typing import Any

from hardy.cli.command import Command, data_option


def _data(options: Any) -> None:
    from hardy.data.sources import data_root, describe

    print(describe(data_root(options.data)))


COMMAND = Command(name="data", words="list the data sets and which of them are here", declare=data_option, call=_data)
