"""The sections of a run's page: functions of a stored run, which give nothing where it holds nothing of their kind."""
