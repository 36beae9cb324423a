"""``python -m fsdpc`` is the ``fsdpc`` command."""

import sys

from fsdpc.cli import main

sys.exit(main())
