"""``python -m zephon_torch`` is ``zephon-torch``."""

import sys

from zephon_torch.audit.cli import main

if __name__ == "__main__":
    sys.exit(main())
