"""``python -m odc_launcher`` is ``odc-launch``."""

import sys

from odc_launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
