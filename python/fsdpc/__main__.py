"""Run the ``fsdpc`` command as ``python -m fsdpc``."""

import sys

from fsdpc.cli.main import main

sys.exit(main())
