"""Entry point of `python -m jaxformer`."""

import sys

from jaxformer.cli import main

sys.exit(main())
