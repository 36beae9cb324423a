"""``python -m fsdpc`` is the ``fsdpc`` command."""

import sys

from fsdpc.cli.main import main

sys.exit(main())
