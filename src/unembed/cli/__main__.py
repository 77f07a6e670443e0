"""`python -m unembed.cli`."""

import sys

from unembed.cli._main import main

sys.exit(main())
