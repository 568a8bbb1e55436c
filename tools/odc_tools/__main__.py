"""``python -m odc_tools`` is ``odc``."""

import sys

from odc_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
