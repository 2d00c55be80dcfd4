"""``python -m stratagem`` is the same program as ``stratagem``."""

import sys

from stratagem.cli import main

sys.exit(main())
