"""``python -m hotcold`` is the ``hotcold`` command."""

import sys

from hotcold.commands.cli import main

sys.exit(main())
