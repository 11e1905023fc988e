"""`python -m hardy.cli`, as `python -m hardy`."""

import sys

from hardy.cli import main

sys.exit(main())
