"""`python -m hardy` is the command `hardy`."""

import sys

from hardy.cli import main

sys.exit(main())
